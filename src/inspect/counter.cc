#include "inspect/counter.h"

#include <algorithm>
#include <cstring>

#include "core/float_environment.h"
#include "inspect/cells.h"

namespace headroom::internal {
namespace {

constexpr int32_t kFirstSubnormalKey = -149 * kClasses;
constexpr int64_t kFoldAfter = int64_t{1} << 31;  // before a uint32_t can overflow

bool is_16_bit(DType dtype) { return size_of(dtype) == 2; }

size_t slots_of(DType dtype) {
  if (is_16_bit(dtype)) return size_t{1} << 15;
  return size_t{kClasses} << (dtype == DType::kF32 ? 8 : 11);
}

// The cell of every 16-bit pattern above zero. Those of inf and NaN are not used.
std::vector<int32_t> cells_by_pattern(DType dtype) {
  std::vector<int32_t> cells(size_t{1} << 15);
  for (uint32_t bits = 1; bits < cells.size(); ++bits) {
    const auto pattern = static_cast<uint16_t>(bits);
    const float value = dtype == DType::kF16 ? half_bits_to_float(pattern) : 0.0f;
    cells[bits] =
        cell_of_float_bits(dtype == DType::kF16 ? float_bits(value) : uint32_t{pattern} << 16);
  }
  return cells;
}

const std::vector<int32_t>& cells_of(DType dtype) {
  static const std::vector<int32_t> f16_cells = cells_by_pattern(DType::kF16);
  static const std::vector<int32_t> bf16_cells = cells_by_pattern(DType::kBF16);
  return dtype == DType::kF16 ? f16_cells : bf16_cells;
}

// Counts four neighbouring elements in four copies of the table, or all of them in the first.
template <size_t kCopiesUsed>
void count4(uint64_t four, size_t mask, size_t stride, uint32_t* table) {
  ++table[four & mask];
  ++table[(kCopiesUsed > 1 ? stride : 0) + (four >> 16 & mask)];
  ++table[(kCopiesUsed > 1 ? 2 * stride : 0) + (four >> 32 & mask)];
  ++table[(kCopiesUsed > 1 ? 3 * stride : 0) + (four >> 48 & mask)];
}

template <size_t kCopiesUsed>
void count16(const char* data, size_t count, size_t mask, size_t stride, uint32_t* table) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    uint64_t eight[2];
    std::memcpy(eight, data + 2 * i, sizeof(eight));
    count4<kCopiesUsed>(eight[0], mask, stride, table);
    count4<kCopiesUsed>(eight[1], mask, stride, table);
  }
  for (; i < count; ++i) {
    uint16_t one;
    std::memcpy(&one, data + 2 * i, sizeof(one));
    ++table[one & mask];
  }
}

}  // namespace

MagnitudeCounter::MagnitudeCounter(DType dtype)
    : dtype_(dtype), slots_(slots_of(dtype)), table_(slots_), sums_(slots_) {}

void MagnitudeCounter::add(const void* data, int64_t count) {
  const char* p = static_cast<const char*>(data);
  for (int64_t done = 0; done < count;) {
    const int64_t now = std::min<int64_t>(count - done, int64_t{1} << 16);
    if (in_table_ + now > kFoldAfter) fold();
    const char* from = p + static_cast<size_t>(done) * size_of(dtype_);
    is_16_bit(dtype_) ? add16(from, static_cast<size_t>(now))
                      : add_slots(from, static_cast<size_t>(now));
    in_table_ += now;
    done += now;
  }
  count_ += count;
}

void MagnitudeCounter::add16(const char* data, size_t count) {
  // One copy fits into the first-level cache and four do not. Four are faster only where
  // neighbouring elements are often equal.
  if (inspect_kernels().repeats16(data, count) * 32 <= count) {
    count16<1>(data, count, 0x7FFF, slots_, table_.data());
  } else {
    table_.resize(slots_ * kCopies);
    count16<kCopies>(data, count, 0x7FFF, slots_, table_.data());
  }
}

void MagnitudeCounter::add_slots(const char* data, size_t count) {
  table_.resize(slots_ * kCopies);
  const auto to_slots =
      dtype_ == DType::kF32 ? inspect_kernels().slots32 : inspect_kernels().slots64;
  alignas(64) uint16_t slots[kChunk];
  for (size_t i = 0; i < count; i += kChunk) {
    const size_t now = std::min(count - i, kChunk);
    const char* from = data + i * size_of(dtype_);
    ChunkRange range;
    to_slots(from, now, slots, &range);
    count16<kCopies>(reinterpret_cast<const char*>(slots), now, 0xFFFF, slots_, table_.data());
    range_.add(range);
    if (dtype_ == DType::kF32 && range.smallest < 0x00800000u) add_f32_subnormals(from, now);
  }
}

// A subnormal number has no leading one, so the class in its slot is not that of its mantissa.
// Subnormal f64 need no treatment: all of them are in the lowest cell.
void MagnitudeCounter::add_f32_subnormals(const char* data, size_t count) {
  f32_subnormals_.resize(-126 * kClasses - kFirstSubnormalKey);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, data + i * sizeof(bits), sizeof(bits));
    bits &= 0x7FFFFFFFu;
    if (bits == 0 || bits >= 0x00800000u) continue;
    ++f32_subnormals_[static_cast<size_t>(cell_of_float_bits(bits) - kFirstSubnormalKey)];
  }
}

void MagnitudeCounter::fold() {
  for (size_t copy = 0; copy * slots_ < table_.size(); ++copy) {
    const uint32_t* from = table_.data() + copy * slots_;
    for (size_t i = 0; i < slots_; ++i) sums_[i] += from[i];
  }
  std::fill(table_.begin(), table_.end(), 0u);
  in_table_ = 0;
}

void MagnitudeCounter::push(Magnitudes* out, int32_t key, int64_t count) const {
  if (count == 0) return;
  if (!out->cells_.empty() && out->cells_.back().key == key) {
    out->cells_.back().count += count;
  } else {
    out->cells_.push_back({key, count});
  }
}

void MagnitudeCounter::finish16(Magnitudes* out) {
  const size_t inf = dtype_ == DType::kF16 ? 0x7C00 : 0x7F80;
  const std::vector<int32_t>& cells = cells_of(dtype_);
  out->zeros_ = sums_[0];
  for (size_t bits = 1; bits < inf; ++bits) {
    if (sums_[bits] == 0) continue;
    push(out, cells[bits], sums_[bits]);
    range_.largest = bits;
    range_.smallest = std::min<uint64_t>(range_.smallest, bits);
  }
  out->infs_ = sums_[inf];
  for (size_t bits = inf + 1; bits < slots_; ++bits) out->nans_ += sums_[bits];
}

void MagnitudeCounter::finish_slots(Magnitudes* out) {
  const size_t exponents = slots_ / kClasses;
  const int bias = static_cast<int>(exponents) / 2 - 1;
  out->zeros_ = sums_[0];
  for (size_t i = 0; i < f32_subnormals_.size(); ++i) {
    push(out, kFirstSubnormalKey + static_cast<int32_t>(i), f32_subnormals_[i]);
  }
  for (size_t i = dtype_ == DType::kF32 ? kClasses : 1; i < slots_ - kClasses; ++i) {
    const auto octave = static_cast<int>(i / kClasses) - bias;
    push(out, cell_key(octave, static_cast<int>(i % kClasses)), sums_[i]);
  }
  out->infs_ = sums_[slots_ - kClasses];
  for (size_t i = slots_ - kClasses + 1; i < slots_; ++i) out->nans_ += sums_[i];
}

void MagnitudeCounter::finish(Magnitudes* out) {
  const DefaultFloatEnvironment environment;
  fold();
  Magnitudes found;
  found.count_ = count_;
  is_16_bit(dtype_) ? finish16(&found) : finish_slots(&found);
  if (found.nonzero() > 0) {
    found.largest_ = magnitude_value(dtype_, range_.largest);
    found.smallest_ = magnitude_value(dtype_, range_.smallest);
  }
  out->merge(found);
  std::fill(sums_.begin(), sums_.end(), 0);
  f32_subnormals_.clear();
  range_ = {};
  count_ = 0;
}

}  // namespace headroom::internal
