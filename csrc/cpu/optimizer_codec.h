// The dynamic map on vectors: decode is two table look-ups and an fma, encode three look-ups and two fmas, the second of which
// leaves the code in the third byte of its result. Codes come as floats of 2^25 + 4 * code, which is a code in the last byte of
// the bits of 2^25.
// Included once per ISA, after optimizer_simd_<isa>.h.
#pragma once

#include "optimizer.h"

namespace halfbyte::cpu::optimizer {
namespace {

constexpr uint32_t kInfBits = 0x7F800000u;
constexpr int kGroup = 4 * kWidth;        // elements that are encoded together
template <bool SIGNED>
constexpr uint32_t kTieLimit = SIGNED ? 2 * kTieUlps : 4 * kTieUlps;  // unsigned words are doubled

// map(code) of first moments.
inline Floats decode_signed(Floats code) {
  const Floats m = sub(code, splat(0x1p25f + 4 * 127.0f));  // 4 m, with the sign
  const Ints e = shift_right<23>(bits(m));
  return fma(m, lookup8(kSignedMap.B, e), xor_sign(lookup8(kSignedMap.A, e), m));
}

// map(code) of second moments.
inline Floats decode_unsigned(Floats code) {
  const Floats m = sub(code, splat(0x1p25f - 4 * 1.0f));  // 4 m
  const Ints e = shift_right<23>(bits(m));
  return fma(m, lookup8(kUnsignedMap.B, e), lookup8(kUnsignedMap.A, e));
}

// The largest |moment| of a block, as bits.
struct MomentMaxima {
  uint32_t first, second;
};

// Corrects the codes of a group's elements whose bit is set in `near`: their words are near a midpoint. Fewer than one group in 150
// comes here.
template <bool SIGNED>
[[gnu::noinline, gnu::cold]] void settle_ties(uint64_t near, const float* x, const float* factors, uint8_t* codes) {
  constexpr const DynamicMap& map = SIGNED ? kSignedMap : kUnsignedMap;
  for (; near != 0; near &= near - 1) {
    const int i = __builtin_ctzll(near);
    if (!SIGNED && !(x[i] > 0.0f)) continue;
    const bool negative = float_bits(x[i]) >> 31;
    const float a = (negative ? -x[i] : x[i]) * factors[i];
    const int low = SIGNED ? 0 : 2, high = SIGNED && negative ? 127 : map.last;
    int m = SIGNED ? (codes[i] < 127 ? 127 - codes[i] : codes[i] - 127) : codes[i] + 1;
    while (m < high && a > map.midpoint[m]) ++m;
    while (m > low && !(a > map.midpoint[m - 1])) --m;
    codes[i] = uint8_t(SIGNED ? (negative ? 127 - m : 127 + m) : m - 1);
  }
}

// What each of a group's vectors is multiplied with: vectors of one block share it, short rows have their own.
struct OneFactor {
  Floats value;
  Floats of(int) const { return value; }
};
struct FactorPerVector {
  float value[4];
  Floats of(int vector) const { return splat(value[vector]); }
};
struct FactorPerLane {
  Floats value[4];
  Floats of(int vector) const { return value[vector]; }
};

// Code words of N vectors of x, times their factors 0 to 1.0000001 in magnitude. Bits 16 to 23 are m (signed, 0..128) or m - 1
// (unsigned, 0..255; 0 for whatever lies below m = 2), the lower half is the fraction behind it, which is small where the product may
// lie on the other side of a midpoint.
template <bool SIGNED, int N, class Factor>
[[gnu::always_inline]] inline void code_words(const float* x, const Factor& factor, int vector, Ints* words) {
  constexpr const DynamicMap& map = SIGNED ? kSignedMap : kUnsignedMap;
  Floats w[N];
  Class<SIGNED> c[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) w[j] = mul(load(x + j * kWidth), factor.of(vector + j));
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) c[j].guess(w[j]);
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) c[j].correct();
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) w[j] = in_turn(minimum(fma(c[j].magnitude(), c[j].J(), splat(float(8.0 / 9.0))), splat(kInsideLastStep)));
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    const Ints word = bits(c[j].scaled(w[j], map.code_offset));
    words[j] = SIGNED ? word : add_ints(word, word);  // half of a code has 7 bits, as a magnitude has
  }
}

// Codes of VECTORS vectors of x, 4 at most, from their words; writes kGroup bytes, those after the last vector are unspecified.
template <bool SIGNED, int VECTORS, class Factor>
[[gnu::always_inline]] inline void store_group(const Ints (&words)[4], const float* x, const Factor& factor, uint8_t* codes) {
  Ints nearest = words[0];
#pragma GCC unroll 4
  for (int j = 1; j < VECTORS; ++j) nearest = minimum_halves(nearest, words[j]);
  // A positive second moment has no code 0, but one so far below the block's largest is rare: looked for only where there is a 0.
  const Codes found = SIGNED ? signed_codes(words, x) : unsigned_codes(words);
  store_codes(codes, found);
  const bool rare = SIGNED ? any_half_below(nearest, kTieLimit<SIGNED>) : any_half_below_or_zero(nearest, kTieLimit<SIGNED>, found);
  if (rare) [[unlikely]] {
    if (!SIGNED) store_codes(codes, positive_not_zero(found, x));
    alignas(64) float factors[kGroup];
    uint64_t near = 0;
    for (int j = 0; j < VECTORS; ++j) {
      near |= uint64_t(lower_halves_below(words[j], kTieLimit<SIGNED>)) << (j * kWidth);
      store(factors + j * kWidth, factor.of(j));
    }
    settle_ties<SIGNED>(near, x, factors, codes);
  }
}

// Inlined by order, as all that it calls: a call for each group would load tables and constants again, a fifth of all instructions.
// Codes of x times the vector's factor for VECTORS vectors, a group at most or whole groups; writes whole groups, as store_group does.
template <bool SIGNED, int VECTORS, class Factor>
[[gnu::always_inline]] inline void encode_vectors(const float* x, const Factor& factor, uint8_t* codes) {
  constexpr int kGroups = (VECTORS + 3) / 4, kTurns = VECTORS < kByTurns ? VECTORS : kByTurns;
  static_assert(VECTORS % kTurns == 0 && (kGroups == 1 || VECTORS % 4 == 0));
  const Ints none = splat_bits(0xFFFFFFFFu);
  Ints words[4 * kGroups] = {none, none, none, none};
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; j += kTurns) code_words<SIGNED, kTurns>(x + j * kWidth, factor, j, words + j);
#pragma GCC unroll 2
  for (int g = 0; g < kGroups; ++g) {
    const Ints of_group[4] = {words[4 * g], words[4 * g + 1], words[4 * g + 2], words[4 * g + 3]};
    store_group<SIGNED, kGroups == 1 ? VECTORS : 4>(of_group, x + g * kGroup, factor, codes + g * kGroup);
  }
}

// Blocks with moments that are not finite, or negative second ones: where not both are finite they become 0 and leave the
// block's scales alone. Returns the scales' bits. `second` may be null.
[[gnu::noinline, gnu::cold]] MomentMaxima restart_unusual(float* first, float* second, int64_t count) {
  MomentMaxima most{};
  for (int64_t i = 0; i < count; ++i) {
    if (!is_finite(first[i]) || (second && !is_finite(second[i]))) {
      first[i] = 0.0f;
      if (second) second[i] = 0.0f;
    }
    const uint32_t a = float_bits(first[i]) & 0x7FFFFFFFu, b = second ? float_bits(second[i]) & 0x7FFFFFFFu : 0;
    if (a > most.first) most.first = a;
    if (b > most.second) most.second = b;
    if (second && !(second[i] > 0.0f)) second[i] = 0.0f;  // negative ones have the code of 0
  }
  return most;
}

// x[0..count) -> codes and their scale. x holds kStateBlock floats, zero from `count` to the next multiple of kWidth;
// `absmax_bits` is the largest |x| as bits, a finite number.
template <bool SIGNED>
inline void encode_block(float* x, int64_t count, uint32_t absmax_bits, uint8_t* codes, float* scale) {
  constexpr uint8_t kZeroCode = SIGNED ? 127 : 0;
  if (absmax_bits == 0) [[unlikely]] {
    *scale = 0.0f;
    memset(codes, kZeroCode, size_t(count));
    return;
  }
  *scale = bits_float(absmax_bits);
  float factor = 1.0f / *scale;
  if (*scale > 0x1p126f) [[unlikely]] {  // the reciprocal would be subnormal, that is 0
    for (int64_t i = 0; i < round_up(count, kWidth); ++i) x[i] *= 0.25f;
    factor = 1.0f / (*scale * 0.25f);
  }
  const OneFactor one{splat(factor)};
  int64_t i = 0;
  constexpr int kMost = kByTurns > 4 ? kByTurns : 4;
  for (; i + kMost * kWidth <= count; i += kMost * kWidth) encode_vectors<SIGNED, kMost>(x + i, one, codes + i);
  if (kMost > 4 && i + kGroup <= count) {
    encode_vectors<SIGNED, 4>(x + i, one, codes + i);
    i += kGroup;
  }
  if (i < count) {  // rows of a LoRA matrix are one vector or two: encode no more than that
    uint8_t tail[kGroup];
    switch ((count - i + kWidth - 1) / kWidth) {
      case 1: encode_vectors<SIGNED, 1>(x + i, one, tail); break;
      case 2: encode_vectors<SIGNED, 2>(x + i, one, tail); break;
      case 3: encode_vectors<SIGNED, 3>(x + i, one, tail); break;
      default: encode_vectors<SIGNED, 4>(x + i, one, tail); break;
    }
    memcpy(codes + i, tail, size_t(count - i));
  }
}

// Whether a block of this absmax takes the usual way through encode_block: not zero, finite, with a reciprocal.
inline bool is_plain(uint32_t absmax_bits) { return absmax_bits - 1u < float_bits(0x1p126f); }

// Rows of `length` elements, some of which are not plain: moments as update_vector leaves them -> codes and scales.
// `second` may be null.
[[gnu::noinline, gnu::cold]] void encode_unusual_rows(const float* first, const float* second, int64_t rows, int64_t length,
                                                      uint8_t* first_codes, float* first_scales, uint8_t* second_codes,
                                                      float* second_scales) {
  for (int64_t r = 0; r < rows; ++r) {
    alignas(64) float row[2][kGroup] = {};
    memcpy(row[0], first + r * length, size_t(length) * sizeof(float));
    if (second) memcpy(row[1], second + r * length, size_t(length) * sizeof(float));
    const MomentMaxima most = restart_unusual(row[0], second ? row[1] : nullptr, length);
    encode_block<true>(row[0], length, most.first, first_codes + r * length, first_scales + r);
    if (second) encode_block<false>(row[1], length, most.second, second_codes + r * length, second_scales + r);
  }
}

}  // namespace
}  // namespace halfbyte::cpu::optimizer
