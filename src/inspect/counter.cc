#include "inspect/counter.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/float_environment.h"

namespace headroom::internal {
namespace {

constexpr int32_t kSmallestF32Key = -149 * kClasses;
constexpr int64_t kFlushAfter = int64_t{1} << 31;  // before a uint32_t counter can overflow

}  // namespace

MagnitudeCounter::MagnitudeCounter(DType dtype)
    : dtype_(dtype),
      layout_(layout_of(dtype)),
      slots_(size_of(dtype) == 2 ? size_t{1} << 15 : size_t{kClasses} << layout_.exponent_bits),
      tables_(kTables * slots_),
      subnormals_(-126 * kClasses - kSmallestF32Key) {}

void MagnitudeCounter::add(const void* data, int64_t count) {
  const char* p = static_cast<const char*>(data);
  while (count > 0) {
    const int64_t now = std::min<int64_t>(count, kChunk);
    if (in_tables_ + now > kFlushAfter) flush();
    add_chunk(p, static_cast<size_t>(now));
    in_tables_ += now;
    p += static_cast<size_t>(now) * size_of(dtype_);
    count -= now;
  }
}

void MagnitudeCounter::add_chunk(const char* data, size_t count) {
  alignas(64) uint16_t slots[kChunk];
  ChunkRange range;
  inspect_kernels().classify[static_cast<size_t>(dtype_)](data, count, slots, &range);
  uint32_t* const tables = tables_.data();
  size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    ++tables[slots[i]];
    ++tables[slots_ + slots[i + 1]];
    ++tables[2 * slots_ + slots[i + 2]];
    ++tables[3 * slots_ + slots[i + 3]];
  }
  for (; i < count; ++i) ++tables[slots[i]];
  range_.largest = std::max(range_.largest, range.largest);
  range_.smallest = std::min(range_.smallest, range.smallest);
  if (dtype_ == DType::kF32 && range.smallest < 0x00800000u) add_f32_subnormals(data, count);
}

// A subnormal number has no leading one, so the class in its slot is not that of its mantissa. The
// numbers are counted here by their value, and flush() ignores their slots. All subnormal f64 are
// in the lowest cell, to which cell_key() maps their slots anyway.
void MagnitudeCounter::add_f32_subnormals(const char* data, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint32_t mantissa;
    std::memcpy(&mantissa, data + i * sizeof(mantissa), sizeof(mantissa));
    mantissa &= 0x7FFFFFFFu;
    if (mantissa == 0 || mantissa >= 0x00800000u) continue;
    // Shift the leading one to bit 23, where a normal f32 has it implicitly.
    const int width = std::bit_width(mantissa);
    const auto normalized = static_cast<int32_t>(mantissa << (24 - width) & 0x7FFFFF);
    const int index = (width - 1) * kClasses + mantissa_class<23>(normalized);
    ++subnormals_[static_cast<size_t>(index)];
  }
}

int64_t MagnitudeCounter::count_of(size_t slot) const {
  int64_t count = 0;
  for (size_t table = 0; table < kTables; ++table) count += tables_[table * slots_ + slot];
  return count;
}

int32_t MagnitudeCounter::key_of(size_t slot) const {
  if (size_of(dtype_) == 2) return cell_of(magnitude_value(dtype_, slot));
  const int octave = static_cast<int>(slot / kClasses) - layout_.bias();
  return cell_key(octave, static_cast<int>(slot % kClasses));
}

void MagnitudeCounter::flush() {
  const DefaultFloatEnvironment environment;  // magnitude_value() must not flush subnormals
  Magnitudes found;
  const auto push = [&](int32_t key, int64_t count) {
    if (count == 0) return;
    if (found.cells_.empty() || found.cells_.back().key != key) found.cells_.push_back({key, 0});
    found.cells_.back().count += count;
  };
  found.count_ = in_tables_;
  found.zeros_ = count_of(0);
  for (size_t i = 0; i < subnormals_.size(); ++i) {
    push(kSmallestF32Key + static_cast<int32_t>(i), subnormals_[i]);
  }
  // Slot 0 is zero; f32 has its subnormal numbers below kClasses. inf and NaN are at the end.
  const size_t inf = size_of(dtype_) == 2 ? layout_.inf() : slots_ - kClasses;
  for (size_t slot = dtype_ == DType::kF32 ? kClasses : 1; slot < inf; ++slot) {
    push(key_of(slot), count_of(slot));
  }
  found.infs_ = count_of(inf);
  for (size_t slot = inf + 1; slot < slots_; ++slot) found.nans_ += count_of(slot);
  if (found.nonzero() > 0) {
    found.largest_ = magnitude_value(dtype_, range_.largest);
    found.smallest_ = magnitude_value(dtype_, range_.smallest);
  }
  total_.merge(found);
  std::fill(tables_.begin(), tables_.end(), 0u);
  std::fill(subnormals_.begin(), subnormals_.end(), 0);
  range_ = {};
  in_tables_ = 0;
}

void MagnitudeCounter::finish(Magnitudes* out) {
  flush();
  out->merge(std::exchange(total_, {}));
}

}  // namespace headroom::internal
