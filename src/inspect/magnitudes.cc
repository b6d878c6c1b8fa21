#include <headroom/inspect.h>
#include <headroom/policy.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "core/check.h"
#include "core/float_environment.h"
#include "core/parallel.h"
#include "inspect/cells.h"
#include "inspect/counter.h"

namespace headroom {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 24;  // per task; much larger than a counter's tables

void check_host(const TensorView& grads) {
  internal::check_view(grads, internal::Access::kRead, [] { return "The gradient"; });
  internal::require(grads.device.type == DeviceType::kCPU, ErrorCode::kUnsupported, [] {
    return "The gradient is on a CUDA device; copy it to host memory to inspect it.";
  });
}

/// Calls work(data, count) for all pieces of a tensor, from several threads.
template <typename Work>
void for_pieces(const TensorView& grads, const Work& work) {
  const size_t size = size_of(grads.dtype);
  const size_t pieces = (grads.bytes() + kPieceBytes - 1) / kPieceBytes;
  internal::parallel_for(pieces, grads.bytes(), [&](size_t piece) {
    const size_t begin = piece * kPieceBytes;
    const size_t bytes = std::min(kPieceBytes, grads.bytes() - begin);
    work(static_cast<const char*>(grads.data) + begin, static_cast<int64_t>(bytes / size));
  });
}

/// Reads the magnitudes of `count` elements and adds up their outcomes.
template <typename Bits>
Outcome count_outcomes(DType dtype, const char* data, int64_t count, Format format, double scale) {
  const FormatLimits& limit = limits(format);
  const uint64_t inf = internal::layout_of(dtype).inf();
  // The sign of the result is that of the exact difference: the product of a float and the scale,
  // also a float, is exact in double precision, and fma rounds only once.
  const auto above = [&](double x, double bound) {
    return sizeof(Bits) < 8 ? x * scale - bound : std::fma(x, scale, -bound);
  };
  Outcome outcome;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, data + static_cast<size_t>(i) * sizeof(Bits), sizeof(Bits));
    bits = static_cast<Bits>(bits & std::numeric_limits<Bits>::max() / 2);  // without the sign
    if (bits == 0 || bits >= inf) continue;
    const double x = internal::magnitude_value(dtype, bits);
    const double above_overflow = above(x, limit.overflow);
    outcome.overflow += above_overflow > 0.0 || (above_overflow == 0.0 && limit.tie_overflows);
    const bool flushed = above(x, limit.flush) <= 0.0;
    outcome.flushed += flushed;
    outcome.subnormal += !flushed && above(x, limit.normal) < 0.0;
  }
  return outcome;
}

}  // namespace

const FormatLimits& limits(Format format) {
  // Rounding to nearest: each limit is halfway between two neighbouring numbers of the format.
  static constexpr FormatLimits kLimits[] = {
      {"fp16", 0x1p-25, 0x1p-14 - 0x1p-25, 65520.0, true},
      {"bf16", 0x1p-134, 0x1p-126 - 0x1p-134, 0x1p128 - 0x1p119, true},
      {"e5m2", 0x1p-17, 0x1p-14 - 0x1p-17, 61440.0, true},
      {"e4m3", 0x1p-10, 0x1p-6 - 0x1p-10, 464.0, false}};
  internal::require(format <= Format::kE4M3, ErrorCode::kInvalidArgument,
                    [] { return "The format must be kFP16, kBF16, kE5M2 or kE4M3."; });
  return kLimits[static_cast<size_t>(format)];
}

void Magnitudes::add(const TensorView& grads) {
  check_host(grads);
  std::mutex mutex;
  Magnitudes found;
  for_pieces(grads, [&](const char* data, int64_t count) {
    internal::MagnitudeCounter counter(grads.dtype);
    counter.add(data, count);
    const std::lock_guard lock(mutex);
    counter.finish(&found);
  });
  merge(found);
}

void Magnitudes::merge(const Magnitudes& other) {
  if (other.nonzero() > 0) {
    smallest_ = nonzero() > 0 ? std::min(smallest_, other.smallest_) : other.smallest_;
    largest_ = std::max(largest_, other.largest_);
  }
  count_ += other.count_;
  zeros_ += other.zeros_;
  infs_ += other.infs_;
  nans_ += other.nans_;
  std::vector<Cell> merged;
  merged.reserve(std::max(cells_.size(), other.cells_.size()));
  for (auto a = cells_.cbegin(), b = other.cells_.cbegin();
       a != cells_.cend() || b != other.cells_.cend();) {
    const bool take_a = b == other.cells_.cend() || (a != cells_.cend() && a->key <= b->key);
    const Cell& next = take_a ? *a++ : *b++;
    if (!merged.empty() && merged.back().key == next.key) {
      merged.back().count += next.count;
    } else {
      merged.push_back(next);
    }
  }
  cells_ = std::move(merged);
}

Outcome Magnitudes::at(Format format, int power) const {
  const FormatLimits& limit = limits(format);
  internal::require(power >= -126 && power <= 126, ErrorCode::kInvalidArgument, [&] {
    return "Scale 2^" + std::to_string(power) + " is out of range; it must be 2^-126 to 2^126.";
  });
  // Scaling by 2^power moves a number by `power` octaves; the limits are moved the other way.
  const int32_t moved = power * internal::kClasses;
  const int32_t flush = internal::cell_of(limit.flush) - moved;
  const int32_t normal = internal::cell_of(limit.normal) - moved;
  const int32_t overflow = internal::cell_of(limit.overflow) - moved + !limit.tie_overflows;
  Outcome outcome;
  for (const Cell& cell : cells_) {
    if (cell.key <= flush) {
      outcome.flushed += cell.count;
    } else if (cell.key < normal) {
      outcome.subnormal += cell.count;
    } else if (cell.key >= overflow) {
      outcome.overflow += cell.count;
    }
  }
  return outcome;
}

Outcome outcome_at(const TensorView& grads, Format format, float scale) {
  check_host(grads);
  internal::require(
      scale >= kSmallestScale && scale <= kLargestScale, ErrorCode::kInvalidArgument, [&] {
        return "Scale " + internal::number(scale) + " is out of range; it must be 2^-126 to 2^126.";
      });
  const size_t size = size_of(grads.dtype);
  const auto count_piece = size == 2   ? count_outcomes<uint16_t>
                           : size == 4 ? count_outcomes<uint32_t>
                                       : count_outcomes<uint64_t>;
  std::mutex mutex;
  Outcome outcome;
  for_pieces(grads, [&](const char* data, int64_t count) {
    const internal::DefaultFloatEnvironment environment;  // of this thread
    const Outcome part = count_piece(grads.dtype, data, count, format, scale);
    const std::lock_guard lock(mutex);
    outcome.flushed += part.flushed;
    outcome.subnormal += part.subnormal;
    outcome.overflow += part.overflow;
  });
  return outcome;
}

}  // namespace headroom
