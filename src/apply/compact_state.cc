// Conversion of compact masters and moments from and to FP32, element by element, with the scalar
// reference of formats.h.
#include "apply/compact_state.h"

#include <algorithm>

#include "apply/formats.h"
#include "core/parallel.h"

namespace headroom::internal {
namespace {

template <typename T>
std::vector<T> fetch(const void* from, size_t count, const Device& device) {
  std::vector<T> values(count);
  if (count > 0) copy_memory(device, values.data(), from, count * sizeof(T));
  return values;
}

template <typename T>
void put(void* to, const std::vector<T>& values, const Device& device) {
  if (!values.empty()) copy_memory(device, to, values.data(), values.size() * sizeof(T));
}

// Calls f(begin, end) for parts of [0, count) that begin at whole groups, on all threads.
template <typename F>
void for_parts(size_t count, const F& f) {
  constexpr size_t kPart = size_t{1} << 14;
  constexpr size_t kBytes = 16;  // read and written per element, an estimate
  static_assert(kPart % kGroupSize == 0);
  parallel_for((count + kPart - 1) / kPart, count * kBytes,
               [&](size_t part) { f(part * kPart, std::min(count, (part + 1) * kPart)); });
}

template <typename W, int kBits>
std::vector<float> join(const TensorView& weight, const Slot& slot) {
  using Split = SplitMaster<W, kBits>;
  const auto count = static_cast<size_t>(weight.count);
  const auto weights = fetch<W>(weight.data, count, weight.device);
  const auto below = fetch<typename Split::Remainder>(slot.arrays.master, count, weight.device);
  std::vector<float> values(count);
  for_parts(count, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) values[i] = Split{weights[i], below[i]}.join();
  });
  return values;
}

// Splits a master, rounded to nearest, into a 16-bit weight and its remainder. In a tie the weight
// is the one above, whose remainder is exact; but a weight that is already the even one below, as
// state "full" and torch round, keeps its value if `keep_even`.
template <typename W, int kBits>
SplitMaster<W, kBits> split_near(float master, W present, bool keep_even) {
  using Split = SplitMaster<W, kBits>;
  constexpr int32_t kHalfUnit = Split::kHalfUnit, kStep = 1 << (16 - kBits);
  constexpr int32_t kMostBelow = (1 << (kBits - 1)) - 1;
  const uint32_t sign = float_bits(master) >> 16 & 0x8000u;
  const uint32_t whole = Split::aligned(master, 0) & kMagnitude;
  const auto distance = [whole](uint32_t weight) {
    return static_cast<int32_t>(whole) - static_cast<int32_t>((weight & 0x7FFFu) << 16);
  };
  uint32_t weight = sign | (whole + kHalfUnit) >> 16;
  const bool even_below = (present.bits & 1) == 0 && present.bits + 1u == weight;
  if (keep_even && even_below && distance(weight) == -kHalfUnit) weight = present.bits;
  // Half a unit above the weight has no code; the largest one is next to it.
  const int32_t below = std::min((distance(weight) + (kStep >> 1)) >> (16 - kBits), kMostBelow);
  return {W::from_bits(static_cast<uint16_t>(weight)),
          static_cast<typename Split::Remainder>(below)};
}

template <typename W, int kBits>
void split(const std::vector<float>& values, const Slot& slot, const TensorView& weight,
           bool compact) {
  using Split = SplitMaster<W, kBits>;
  auto weights = fetch<W>(weight.data, values.size(), weight.device);
  std::vector<typename Split::Remainder> below(values.size());
  for_parts(values.size(), [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Split both = split_near<W, kBits>(values[i], weights[i], !compact);
      weights[i] = both.weight;
      below[i] = both.remainder;
    }
  });
  put(weight.data, weights, weight.device);
  put(slot.arrays.master, below, weight.device);
}

template <typename Code>
std::vector<float> decode(const TensorView& weight, const Slot& slot, size_t moment) {
  const auto count = static_cast<size_t>(weight.count);
  const auto codes = fetch<uint8_t>(slot.arrays.moments[moment], count, weight.device);
  const size_t groups = (count + kGroupSize - 1) / kGroupSize;
  const auto exponents = fetch<uint8_t>(slot.arrays.exponents[moment], groups, weight.device);
  std::vector<float> values(count);
  for_parts(count, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      values[i] = Code::decode(codes[i], exponents[i / kGroupSize]);
    }
  });
  return values;
}

template <typename Code>
void encode(const std::vector<float>& values, const Slot& slot, size_t moment,
            const TensorView& weight) {
  const size_t count = values.size();
  std::vector<uint8_t> codes(count), exponents((count + kGroupSize - 1) / kGroupSize);
  for_parts(count, [&](size_t begin, size_t end) {
    for (size_t first = begin; first < end; first += kGroupSize) {
      const size_t last = std::min(end, first + kGroupSize);
      uint32_t largest = 0;
      for (size_t i = first; i < last; ++i) largest = larger(largest, moment_magnitude(values[i]));
      const uint32_t exponent = Code::exponent(largest);
      exponents[first / kGroupSize] = static_cast<uint8_t>(exponent);
      for (size_t i = first; i < last; ++i) {
        codes[i] = Code::encode(values[i], exponent, kNearestMoment);
      }
    }
  });
  put(slot.arrays.moments[moment], codes, weight.device);
  put(slot.arrays.exponents[moment], exponents, weight.device);
}

}  // namespace

std::vector<float> decode_master(const TensorView& weight, const Slot& slot) {
  const bool byte = slot.format == StateFormat::kByte;
  if (weight.dtype == DType::kF16) {
    return byte ? join<f16, 8>(weight, slot) : join<f16, 16>(weight, slot);
  }
  return byte ? join<bf16, 8>(weight, slot) : join<bf16, 16>(weight, slot);
}

void encode_master(const std::vector<float>& values, const Slot& slot, const TensorView& weight,
                   bool compact) {
  const bool byte = slot.format == StateFormat::kByte;
  if (weight.dtype == DType::kF16) {
    byte ? split<f16, 8>(values, slot, weight, compact)
         : split<f16, 16>(values, slot, weight, compact);
  } else {
    byte ? split<bf16, 8>(values, slot, weight, compact)
         : split<bf16, 16>(values, slot, weight, compact);
  }
}

std::vector<float> decode_moment(const TensorView& weight, const Slot& slot, size_t moment) {
  if (slot.format == StateFormat::kByte) {
    return moment == 0 ? decode<FirstMoment>(weight, slot, moment)
                       : decode<SecondMoment>(weight, slot, moment);
  }
  const auto count = static_cast<size_t>(weight.count);
  const auto stored = fetch<bf16>(slot.arrays.moments[moment], count, weight.device);
  return {stored.begin(), stored.end()};
}

void encode_moment(const std::vector<float>& values, const Slot& slot, size_t moment,
                   const TensorView& weight) {
  if (slot.format == StateFormat::kByte) {
    moment == 0 ? encode<FirstMoment>(values, slot, moment, weight)
                : encode<SecondMoment>(values, slot, moment, weight);
    return;
  }
  std::vector<bf16> stored(values.size());
  for (size_t i = 0; i < values.size(); ++i) stored[i] = encode_moment(values[i], 0x8000u);
  put(slot.arrays.moments[moment], stored, weight.device);
}

}  // namespace headroom::internal
