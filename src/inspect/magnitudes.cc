#include <headroom/inspect.h>
#include <headroom/policy.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "core/check.h"
#include "core/element.h"
#include "core/float_environment.h"
#include "core/parallel.h"
#include "inspect/cells.h"
#include "inspect/counter.h"

namespace headroom {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 24;  // one thread's share, well above a counter's table

void check_host(const TensorView& grads) {
  internal::check_view(grads, internal::Access::kRead, [] { return "The gradient"; });
  internal::require(grads.device.type == DeviceType::kCPU, ErrorCode::kUnsupported, [] {
    return "The gradient lives on a CUDA device; copy it to host memory to inspect it.";
  });
}

/// Calls work(data, count) for the pieces of a tensor, on several threads.
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

constexpr uint64_t kInfBits[] = {0x7C00, 0x7F80, 0x7F800000, 0x7FF0000000000000};

/// The first magnitude of this type, as bits, for which `yes` holds; it holds for all above. That
/// of inf if there is none.
template <typename Predicate>
uint64_t first_bits(DType dtype, const Predicate& yes) {
  uint64_t low = 0;
  uint64_t high = kInfBits[static_cast<size_t>(dtype)];
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    yes(internal::magnitude_value(dtype, middle)) ? high = middle : low = middle + 1;
  }
  return low;
}

}  // namespace

namespace internal {

BitLimits bit_limits(DType dtype, Format format, double scale) {
  const DefaultFloatEnvironment environment;
  const FormatLimits& limit = limits(format);
  // fma rounds once, so the sign of its result is that of the exact difference.
  const auto above = [&](double x, double bound) { return std::fma(x, scale, -bound); };
  return {first_bits(dtype, [&](double x) { return above(x, limit.flush) > 0; }) - 1,
          first_bits(dtype, [&](double x) { return above(x, limit.normal) >= 0; }),
          first_bits(dtype,
                     [&](double x) {
                       const double difference = above(x, limit.overflow);
                       return limit.tie_overflows ? difference >= 0 : difference > 0;
                     }),
          kInfBits[static_cast<size_t>(dtype)]};
}

void count_fates(const void* data, int64_t count, DType dtype, const BitLimits& limits,
                 Fates* fates) {
  constexpr int64_t kPart = 32768;
  const InspectKernels& kernels = inspect_kernels();
  const size_t size = size_of(dtype);
  const auto kernel = size == 2 ? kernels.fates16 : size == 4 ? kernels.fates32 : kernels.fates64;
  for (int64_t i = 0; i < count; i += kPart) {
    kernel(static_cast<const char*>(data) + static_cast<size_t>(i) * size,
           static_cast<size_t>(std::min(count - i, kPart)), limits, fates);
  }
}

Fates fates_of(const TensorView& tensor, Format format, double scale) {
  check_host(tensor);
  const BitLimits limits = bit_limits(tensor.dtype, format, scale);
  std::mutex mutex;
  Fates all;
  for_pieces(tensor, [&](const char* data, int64_t count) {
    Fates fates;
    count_fates(data, count, tensor.dtype, limits, &fates);
    const std::lock_guard lock(mutex);
    all.add(fates);
  });
  return all;
}

}  // namespace internal

const FormatLimits& limits(Format format) {
  // The ends of the ranges lie halfway between two numbers of the format.
  static constexpr FormatLimits kLimits[] = {
      {"fp16", 0x1p-25, 0x1p-14 - 0x1p-25, internal::kRoundsToInfF16, true},
      {"bf16", 0x1p-134, 0x1p-126 - 0x1p-134, 0x1p128 - 0x1p119, true},
      {"e5m2", 0x1p-17, 0x1p-14 - 0x1p-17, 61440.0, true},
      {"e4m3", 0x1p-10, 0x1p-6 - 0x1p-10, 464.0, false}};
  internal::require(format <= Format::kE4M3, ErrorCode::kInvalidArgument,
                    [] { return "The format is none of kFP16, kBF16, kE5M2 and kE4M3."; });
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
    return "Scale 2^" + std::to_string(power) + " is out of range; take 2^-126 to 2^126.";
  });
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
  internal::require(
      scale >= kSmallestScale && scale <= kLargestScale, ErrorCode::kInvalidArgument, [&] {
        return "Scale " + internal::number(scale) + " is out of range; take 2^-126 to 2^126.";
      });
  const internal::Fates fates = internal::fates_of(grads, format, scale);
  return {fates.flushed, fates.subnormal, fates.overflow};
}

}  // namespace headroom
