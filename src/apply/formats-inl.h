// The formats of formats.h for vectors, for one SIMD target: the same bits as the scalar reference.
#if defined(HEADROOM_SRC_APPLY_FORMATS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_SRC_APPLY_FORMATS_INL_H_
#undef HEADROOM_SRC_APPLY_FORMATS_INL_H_
#else
#define HEADROOM_SRC_APPLY_FORMATS_INL_H_
#endif

#include <array>
#include <cstring>
#include <type_traits>

#include "apply/formats.h"
#include "core/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace internal {
namespace HWY_NAMESPACE {

constexpr size_t kGroup = static_cast<size_t>(kGroupSize);
constexpr size_t kVectors = kGroup / kFloatLanes;  // of a group

// Unrolls a loop over the vectors of a group, so that arrays of vectors become registers.
#define HEADROOM_UNROLL _Pragma("GCC unroll 32")

template <class D>
using WordsOf = hn::Vec<hn::Rebind<int32_t, D>>;

// Bytes as unsigned or signed lanes.
template <typename T, class D>
HWY_INLINE hn::Vec<hn::Rebind<T, D>> load_bytes(D, const void* from) {
  using Byte = std::conditional_t<std::is_signed_v<T>, int8_t, uint8_t>;
  const hn::Rebind<Byte, D> d8;
  return hn::PromoteTo(hn::Rebind<T, D>(), hn::LoadU(d8, static_cast<const Byte*>(from)));
}

// Byte indices for TableLookupBytesOr0, one row per vector that store_parts() merges. Row i takes
// kSize bytes, from byte kFirst on, of each of the four lanes of a 16-byte block, and puts these
// 4 x kSize bytes at byte 4 x kSize x i of the merged block. 0x80 stands for a zero byte.
template <size_t kSize, size_t kFirst>
struct PartTable {
  static constexpr size_t kMerged = HWY_MIN(4 / kSize, kVectors);
  uint8_t at[kMerged][16];
  constexpr PartTable() : at() {
    for (size_t i = 0; i < kMerged; ++i) {
      for (size_t byte = 0; byte < 16; ++byte) {
        const size_t from = byte - 4 * kSize * i;  // wraps if the byte belongs to an earlier row
        const size_t source = from / kSize * 4 + kFirst + from % kSize;
        at[i][byte] = static_cast<uint8_t>(from < 4 * kSize ? source : 0x80);
      }
    }
  }
};

// Stores kSize bytes of every lane of a group, from byte kFirst on. Truncating vector by vector
// would take about twice as many instructions.
template <size_t kSize, size_t kFirst, class D>
HWY_INLINE void store_parts(D, const BitsOf<D>* group, void* to) {
  constexpr size_t kLanes = hn::MaxLanes(D());
  const hn::Rebind<uint32_t, D> du;
  auto* bytes = static_cast<uint8_t*>(to);
  if constexpr (kLanes < 4) {
    for (size_t k = 0; k < kGroup; ++k) {
      const uint32_t part = hn::GetLane(group[k]) >> (8 * kFirst);
      std::memcpy(bytes + k * kSize, &part, kSize);  // little-endian
    }
  } else {
    using Table = PartTable<kSize, kFirst>;
    static constexpr Table kTable;
    // Lanes of the merged vector in the order of the elements.
    static constexpr auto kOrder = [] {
      constexpr size_t kBlocks = kLanes / 4;
      std::array<uint32_t, 16> order{};
      for (size_t i = 0; i < kLanes; ++i) {
        const size_t vector = i / (kSize * kBlocks) % Table::kMerged;
        order[i] = static_cast<uint32_t>(4 * (i / kSize % kBlocks) + kSize * vector + i % kSize);
      }
      return order;
    }();
    const hn::Repartition<uint8_t, decltype(du)> d8;
    constexpr size_t kBytes = kLanes * kSize * Table::kMerged;
    HEADROOM_UNROLL
    for (size_t k = 0; k < kVectors; k += Table::kMerged) {
      auto merged = hn::Zero(d8);
      HEADROOM_UNROLL
      for (size_t i = 0; i < Table::kMerged; ++i) {
        const auto table = hn::LoadDup128(d8, kTable.at[i]);
        merged = hn::Or(merged, hn::TableLookupBytesOr0(hn::BitCast(d8, group[k + i]), table));
      }
      auto lanes = hn::BitCast(du, merged);
      if constexpr (kLanes > 4) {
        lanes = hn::TableLookupLanes(lanes, hn::SetTableIndices(du, kOrder.data()));
      }
      auto* const at = bytes + k * kLanes * kSize;
      if constexpr (kBytes < 4 * kLanes) {
        hn::StoreU(hn::LowerHalf(hn::BitCast(d8, lanes)), hn::Half<decltype(d8)>(), at);
      } else {
        hn::StoreU(hn::BitCast(d8, lanes), d8, at);
      }
    }
  }
}

// HalfRange::place(), without the subtraction of kMinBits. `lowest` is kMin, or another power of
// two if `value` is scaled by the same factor.
template <class D>
HWY_INLINE BitsOf<D> place_half_range(D d, hn::Vec<D> value, float lowest, BitsOf<D> dither) {
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<uint32_t, D> du;
  const auto subnormal = hn::BitCast(di, hn::Add(value, hn::Set(d, lowest)));
  const auto binade = hn::Set(di, static_cast<int32_t>(HalfRange<0>::kBinade));
  const auto normal = hn::Add(hn::BitCast(di, value), binade);
  return hn::Add(hn::BitCast(du, hn::Max(subnormal, normal)), dither);
}

// HalfRange::unplace().
template <class D>
HWY_INLINE hn::Vec<D> unplace_half_range(D d, BitsOf<D> placed) {
  using Range = HalfRange<0>;
  const hn::Rebind<uint32_t, D> du;
  const auto lowest = hn::Set(du, Range::kMinBits);
  const auto bits = hn::Add(placed, lowest);
  const auto subnormal = hn::Sub(hn::BitCast(d, bits), hn::BitCast(d, lowest));
  const auto normal = hn::BitCast(d, hn::Sub(bits, hn::Set(du, Range::kBinade)));
  return hn::Min(subnormal, normal);
}

// See SplitMaster.
template <class D, typename W, int kBits>
struct Masters {
  using Split = SplitMaster<W, kBits>;
  using Remainder = typename Split::Remainder;
  using DI = hn::Rebind<int32_t, D>;
  using DU = hn::Rebind<uint32_t, D>;
  static constexpr bool kExtraBits = Split::kHalf && kBits == 16;

  static HWY_INLINE hn::Vec<D> join(D d, const W* weight, const Remainder* remainder) {
    const DI di;
    const DU du;
    // HalfRange::unplace() shifts the whole integer: parts that have no lower bits start there.
    constexpr int kDown = Split::kHalf && !kExtraBits ? 3 : 0;
    const hn::Rebind<int16_t, D> d16;
    const auto bits = hn::PromoteTo(di, hn::BitCast(d16, load_halves(d, weight)));
    const auto magnitude = hn::ShiftLeft<16 - kDown>(hn::And(bits, hn::Set(di, 0x7FFF)));
    WordsOf<D> below;
    if constexpr (kBits == 8) {
      below = hn::ShiftLeft<8 - kDown>(load_bytes<int32_t>(d, remainder));
    } else {
      below = hn::PromoteTo(di, hn::LoadU(d16, reinterpret_cast<const int16_t*>(remainder)));
    }
    // Only a weight of 0 can have a sum below 0.
    const auto whole = hn::Max(hn::Add(magnitude, below), hn::Zero(di));
    hn::Vec<D> value;
    if constexpr (!Split::kHalf) {
      value = hn::BitCast(d, whole);
    } else if constexpr (!kExtraBits) {
      value = unplace_half_range(d, hn::BitCast(du, whole));
    } else {
      const auto normal = hn::Add(hn::ShiftRight<3>(whole), hn::Set(di, 0x38000000));
      const auto subnormal =
          hn::BitCast(di, hn::Mul(hn::ConvertTo(d, whole), hn::Set(d, 0x1p-40f)));
      const auto is_normal = hn::Gt(whole, hn::Set(di, static_cast<int32_t>(1u << 26) - 1));
      value = hn::BitCast(d, hn::IfThenElse(is_normal, normal, subnormal));
    }
    return hn::CopySignToAbs(value, hn::BitCast(d, bits));
  }

  // The weight is in the upper half of `weight`. The remainder is in the kBits below the upper half
  // of `aligned`.
  static HWY_INLINE void split(D d, hn::Vec<D> master, BitsOf<D> random, BitsOf<D>& weight,
                               BitsOf<D>& aligned) {
    const DI di;
    const DU du;
    auto dither = hn::Zero(du);
    if constexpr (Split::kDropped > 0) dither = hn::ShiftRight<32 - Split::kDropped>(random);
    if constexpr (!Split::kHalf) {
      const auto quiet = hn::BitCast(d, hn::Set(du, Split::kQuietNan));
      const auto usable = hn::IfThenElse(hn::IsNaN(master), quiet, master);
      aligned = hn::Add(hn::BitCast(du, usable), dither);
      weight = hn::Add(aligned, hn::Set(du, Split::kHalfUnit));
    } else {
      const auto limit = hn::Set(di, static_cast<int32_t>(float_bits(Split::kHalfInf)));
      const auto magnitude = hn::BitCast(d, hn::Min(magnitude_bits(d, master), limit));
      uint32_t half_unit = Split::kHalfUnit;
      if constexpr (kExtraBits) {
        aligned = extra_bits(d, magnitude);
      } else {
        // The bits of kMin, which were not subtracted, are above the remainder: they only have to
        // be subtracted from the weight.
        constexpr uint32_t kMin = HalfRange<0>::kMinBits;
        aligned = hn::ShiftLeft<3>(place_half_range(d, magnitude, bits_float(kMin), dither));
        half_unit -= kMin << 3;
      }
      const auto sign = hn::AndNot(hn::Set(du, kMagnitude), hn::BitCast(du, master));
      weight = hn::Or(hn::Add(aligned, hn::Set(du, half_unit)), sign);
    }
  }

 private:
  // SplitMaster::aligned_half() with 16 bits.
  static HWY_INLINE BitsOf<D> extra_bits(D d, hn::Vec<D> magnitude) {
    const DI di;
    const DU du;
    const auto is_subnormal = hn::Lt(magnitude, hn::Set(d, 0x1p-14f));
    // Zero where it is not used: larger numbers have no integer.
    const auto units = hn::IfThenElseZero(is_subnormal, hn::Mul(magnitude, hn::Set(d, 0x1p40f)));
    const auto subnormal = hn::BitCast(du, hn::ConvertTo(di, units));
    const auto normal =
        hn::ShiftLeft<3>(hn::Sub(hn::BitCast(du, magnitude), hn::Set(du, 0x38000000u)));
    return hn::IfThenElse(hn::RebindMask(du, is_subnormal), subnormal, normal);
  }
};

// See FirstMoment. Groups have a parameter that follows from their exponent, so that it is computed
// once for all vectors of a group.
struct FirstMoments {
  using Code = FirstMoment;
  static float decoder(uint32_t exponent) { return bits_float(exponent << 23); }

  template <class D>
  static HWY_INLINE hn::Vec<D> decode(D d, const uint8_t* codes, float decoder) {
#if HEADROOM_NATIVE_F16
    // An f16 has the same exponents, a bit further up, and more mantissa. The sign is extended to
    // the bit above them, which is cleared.
    const hn::Rebind<int16_t, D> d16;
    const auto code = hn::ShiftLeft<7>(load_bytes<int16_t>(d, codes));
    const auto half = hn::AndNot(hn::Set(d16, 0x4000), code);
    const auto value = half_to_float(d, hn::BitCast(hn::Rebind<uint16_t, D>(), half));
    return hn::Mul(value, hn::Set(d, decoder));
#else
    const hn::Rebind<uint32_t, D> du;
    const auto code = load_bytes<uint32_t>(d, codes);
    const auto placed = hn::ShiftLeft<20>(hn::And(code, hn::Set(du, 0x7Fu)));
    const auto value = hn::Mul(unplace_half_range(d, placed), hn::Set(d, decoder));
    const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(du, 0x80u)));
    return hn::Or(value, hn::BitCast(d, sign));
#endif
  }

  // The bits without the sign; may be more than kLargestMoment.
  template <class D>
  static HWY_INLINE BitsOf<D> magnitude(D d, hn::Vec<D> value) {
    return hn::BitCast(hn::Rebind<uint32_t, D>(), magnitude_bits(d, value));
  }

  // Numbers are encoded with another kMin than that of HalfRange, kLowest: its bits are above those
  // of the code, so that nothing has to be subtracted.
  static constexpr float kLowest = 2.0f;  // 0x40000000
  static float encoder(uint32_t exponent) { return bits_float((254 + 15 - exponent) << 23); }

  // The code is in the uppermost byte.
  template <class D>
  static HWY_INLINE BitsOf<D> encode(D d, hn::Vec<D> value, float encoder, BitsOf<D> random) {
    const hn::Rebind<int32_t, D> di;
    const hn::Rebind<uint32_t, D> du;
    const auto limit = hn::Set(di, static_cast<int32_t>(kLargestMoment));
    const auto limited = hn::BitCast(d, hn::Min(magnitude_bits(d, value), limit));
    const auto dither = hn::ShiftRight<32 - kMomentBits>(random);
    const auto placed = place_half_range(d, hn::Mul(limited, hn::Set(d, encoder)), kLowest, dither);
    const auto code = hn::BitCast(d, hn::ShiftLeft<4>(placed));
    return hn::BitCast(du, hn::CopySignToAbs(code, value));
  }
};

// See SecondMoment. The parameter of a group, for both directions, is first_bits().
struct SecondMoments {
  using Code = SecondMoment;
  static uint32_t decoder(uint32_t exponent) { return Code::first_bits(exponent); }
  static uint32_t encoder(uint32_t exponent) { return Code::first_bits(exponent); }

  template <class D>
  static HWY_INLINE hn::Vec<D> decode(D d, const uint8_t* codes, uint32_t first) {
    const hn::Rebind<uint32_t, D> du;
    const auto code = hn::ShiftLeft<20>(load_bytes<uint32_t>(d, codes));
    return hn::BitCast(d, hn::Add(code, hn::Set(du, first)));
  }

  // Only a NaN can have a sign. As an unsigned number it is larger than any other.
  template <class D>
  static HWY_INLINE BitsOf<D> magnitude(D, hn::Vec<D> value) {
    return hn::BitCast(hn::Rebind<uint32_t, D>(), value);
  }

  // The code is in the uppermost byte.
  template <class D>
  static HWY_INLINE BitsOf<D> encode(D d, hn::Vec<D> value, uint32_t first, BitsOf<D> random) {
    const hn::Rebind<int32_t, D> di;
    const hn::Rebind<uint32_t, D> du;
    const auto limited = hn::Min(magnitude(d, value), hn::Set(du, kLargestMoment));
    const auto sum = hn::Add(limited, hn::ShiftRight<32 - kMomentBits>(random));
    const auto above = hn::BitCast(di, hn::Sub(sum, hn::Set(du, first)));
    return hn::ShiftLeft<4>(hn::BitCast(du, hn::Max(above, hn::Zero(di))));
  }
};

// Moments in bf16, see encode_moment(), in the upper half.
template <class D>
HWY_INLINE BitsOf<D> encode_half(D d, hn::Vec<D> value, BitsOf<D> random) {
  const hn::Rebind<int32_t, D> di;
  const auto limit = hn::Set(di, 0x7F7F0000);
  const auto magnitude = hn::Min(magnitude_bits(d, value), limit);
  const auto dither = hn::ShiftRight<32 - kHalfMomentBits>(random);
  const auto sum = hn::Min(hn::Add(magnitude, hn::BitCast(di, dither)), limit);
  return hn::BitCast(hn::Rebind<uint32_t, D>(), hn::CopySignToAbs(hn::BitCast(d, sum), value));
}

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif  // HEADROOM_SRC_APPLY_FORMATS_INL_H_
