// The dynamic map on vectors: decode is two table look-ups and an fma, encode a class look-up, an fma and a truncation.
// Included once per ISA, after optimizer_simd_<isa>.h.
#pragma once

#include "optimizer.h"

namespace halfbyte::cpu::optimizer {
namespace {

constexpr float kBelowTwo = 1.99999988f;  // the largest float below 2
constexpr uint32_t kInfBits = 0x7F800000u;
constexpr int kGroup = 4 * kWidth;        // elements that are encoded together

// map(code) of first moments.
inline Floats decode_signed(const uint8_t* codes) {
  const Floats d = int_to_float(sub_ints(load_codes(codes), splat_bits(127)));
  const Ints e = shift_right<23>(bits(d));
  const Ints sign = bit_and(bits(d), splat_bits(0x80000000u));
  const Floats a = from_bits(bit_xor(bits(lookup8(kSignedMap.A, e)), sign));
  return keep_if_nonzero(fma(d, lookup8(kSignedMap.B, e), a), d);
}

// map(code) of second moments.
inline Floats decode_unsigned(const uint8_t* codes) {
  const Floats m = int_to_float(add_ints(load_codes(codes), splat_bits(1)));
  const Ints e = shift_right<23>(bits(m));
  return fma(m, lookup8(kUnsignedMap.B, e), lookup8(kUnsignedMap.A, e));
}

// Magnitudes of a >= 0, exact except near midpoints. `nearest_tie` gathers the smallest distance to a step, offset so
// that below 2 * kNearTie means "ask the exact midpoints".
inline Ints magnitude(const DynamicMap& map, Floats a, Ints& nearest_tie) {
  const Ints guess = class_guess(a, map.guess_offset);
  const Ints c = add_if_greater(guess, a, lookup8(map.above, guess));
  const Floats w = fma(a, lookup8(map.J, c), splat(float(8.0 / 9.0)));
  const Ints fraction = shift_left(bits(w), add_ints(c, splat_bits(uint32_t(9 + map.first_exponent))));
  nearest_tie = minimum_unsigned(nearest_tie, add_ints(fraction, splat_bits(kNearTie)));
  // [1, 2) * 2^e, by the exponent field. Above 2 lies the gap below the next class, which belongs to this class's last entry.
  Floats clamped = minimum(w, splat(kBelowTwo));
  if (map.first_exponent != 0) clamped = maximum(clamped, splat(1.0f));  // positive second moments are at least m = 2
  const Ints e = map.first_exponent ? add_ints(c, splat_bits(uint32_t(map.first_exponent))) : c;
  return truncated(from_bits(add_ints(bits(clamped), shift_left<23>(e))));
}

// The largest |moment| of a block, as bits.
struct MomentMaxima {
  uint32_t first, second;
};

// Corrects the codes of `count` elements against the exact midpoints. About one group in 200 comes here.
template <bool SIGNED>
[[gnu::noinline, gnu::cold]] void settle_ties(const float* x, float factor, uint8_t* codes, int count) {
  constexpr const DynamicMap& map = SIGNED ? kSignedMap : kUnsignedMap;
  for (int i = 0; i < count; ++i) {
    if (!SIGNED && !(x[i] > 0.0f)) continue;
    const bool negative = float_bits(x[i]) >> 31;
    const float a = (negative ? -x[i] : x[i]) * factor;
    const int low = SIGNED ? 0 : 2, high = SIGNED && negative ? 127 : map.last;
    int m = SIGNED ? (codes[i] < 127 ? 127 - codes[i] : codes[i] - 127) : codes[i] + 1;
    while (m < high && a > map.midpoint[m]) ++m;
    while (m > low && !(a > map.midpoint[m - 1])) --m;
    codes[i] = uint8_t(SIGNED ? (negative ? 127 - m : 127 + m) : m - 1);
  }
}

// What each of a group's vectors is multiplied with: vectors of one block share it, rows of one vector have their own.
struct OneFactor {
  float value;
  float of(int) const { return value; }
};
struct FactorPerVector {
  float value[4];
  float of(int vector) const { return value[vector]; }
};

// Codes of x * factor for VECTORS vectors; writes kGroup bytes, zero after those.
template <bool SIGNED, int VECTORS, class Factor>
inline void encode_group(const float* x, const Factor& factor, uint8_t* codes) {
  constexpr const DynamicMap& map = SIGNED ? kSignedMap : kUnsignedMap;
  Ints nearest_tie = splat_bits(0xFFFFFFFFu), code[4] = {splat_bits(0), splat_bits(0), splat_bits(0), splat_bits(0)};
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; ++j) {
    const Floats value = load(x + j * kWidth);
    if (SIGNED) {
      const Floats a = mul(from_bits(bit_and(bits(value), splat_bits(0x7FFFFFFFu))), splat(factor.of(j)));
      const Ints m = magnitude(map, a, nearest_tie);
      code[j] = add_ints(negate_if_negative(m, value), splat_bits(127));
    } else {
      const Ints m = magnitude(map, mul(value, splat(factor.of(j))), nearest_tie);
      // By the value itself: a positive one whose product underflows is still positive.
      code[j] = keep_if_positive(sub_ints(m, splat_bits(1)), value);
    }
  }
  store_codes(codes, code);
  if (any_below(nearest_tie, 2 * kNearTie)) [[unlikely]] {
    for (int j = 0; j < VECTORS; ++j) settle_ties<SIGNED>(x + j * kWidth, factor.of(j), codes + j * kWidth, kWidth);
  }
}

// Moments that are not both finite become 0 and leave their block's scales alone; returns the scales' bits. `second` may be null.
[[gnu::noinline, gnu::cold]] MomentMaxima restart_non_finite(float* first, float* second, int64_t count) {
  MomentMaxima most{};
  for (int64_t i = 0; i < count; ++i) {
    if (!is_finite(first[i]) || (second && !is_finite(second[i]))) {
      first[i] = 0.0f;
      if (second) second[i] = 0.0f;
    }
    const uint32_t a = float_bits(first[i]) & 0x7FFFFFFFu, b = second ? float_bits(second[i]) & 0x7FFFFFFFu : 0;
    if (a > most.first) most.first = a;
    if (b > most.second) most.second = b;
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
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) encode_group<SIGNED, 4>(x + i, OneFactor{factor}, codes + i);
  if (i < count) {  // rows of a LoRA matrix are one vector or two: encode no more than that
    uint8_t tail[kGroup];
    switch ((count - i + kWidth - 1) / kWidth) {
      case 1: encode_group<SIGNED, 1>(x + i, OneFactor{factor}, tail); break;
      case 2: encode_group<SIGNED, 2>(x + i, OneFactor{factor}, tail); break;
      case 3: encode_group<SIGNED, 3>(x + i, OneFactor{factor}, tail); break;
      default: encode_group<SIGNED, 4>(x + i, OneFactor{factor}, tail); break;
    }
    memcpy(codes + i, tail, size_t(count - i));
  }
}

// Whether a block of this absmax takes the usual way through encode_block: not zero, finite, with a reciprocal.
inline bool is_plain(uint32_t absmax_bits) { return absmax_bits - 1u < float_bits(0x1p126f); }

// 4 vectors that are 4 / V rows of V vectors, contiguous: codes and the scale of each row.
template <bool SIGNED, int V>
inline void encode_rows(float* x, const uint32_t (&absmax_bits)[4 / V], uint8_t* codes, float* scales) {
  bool plain = true;
  for (int r = 0; r < 4 / V; ++r) plain &= is_plain(absmax_bits[r]);
  if (!plain) [[unlikely]] {
    for (int r = 0; r < 4 / V; ++r)
      encode_block<SIGNED>(x + r * V * kWidth, V * kWidth, absmax_bits[r], codes + r * V * kWidth, scales + r);
    return;
  }
  FactorPerVector factor;
  for (int j = 0; j < 4; ++j) factor.value[j] = 1.0f / bits_float(absmax_bits[j / V]);
  for (int r = 0; r < 4 / V; ++r) scales[r] = bits_float(absmax_bits[r]);
  encode_group<SIGNED, 4>(x, factor, codes);
}

}  // namespace
}  // namespace halfbyte::cpu::optimizer
