// Vectors of one float, for CPUs without a vector form. The same operations as the other optimizer_simd_*.h, so that
// results agree bit for bit.
#pragma once

#include "../dynamic_map.h"
#include "simd/scalar.h"

namespace halfbyte::cpu::optimizer {
namespace {

constexpr int kWidth = 1;
constexpr int kByTurns = 1;
using Floats = float;
using Ints = uint32_t;

inline Floats splat(float x) { return x; }
inline Ints splat_bits(uint32_t x) { return x; }
inline Floats load(const float* p) { return *p; }
inline void store(float* p, Floats x) { *p = x; }
template <class T>
inline Floats load_as(const T* p) {
  return to_float(*p);
}
// The vectors at p and p + kWidth.
template <class T>
inline void load_pair_as(const T* p, Floats& a, Floats& b) {
  a = load_as(p), b = load_as(p + 1);
}
template <class T>
inline void store_as(T* p, Floats x) {
  *p = from_float<T>(x);
}
template <class T>
inline void store_pair_as(T* p, Floats a, Floats b) {
  store_as(p, a);
  store_as(p + 1, b);
}

inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats sub(Floats a, Floats b) { return a - b; }
inline Floats mul(Floats a, Floats b) { return a * b; }
inline Floats divide(Floats a, Floats b) { return a / b; }
inline Floats square_root(Floats a) { return sqrtf(a); }
inline Floats fma(Floats a, Floats b, Floats c) { return fmaf(a, b, c); }
inline Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
inline Ints bits(Floats a) { return float_bits(a); }
inline Floats from_bits(Ints a) { return bits_float(a); }
inline Ints bit_and(Ints a, Ints b) { return a & b; }
inline Ints bit_xor(Ints a, Ints b) { return a ^ b; }
inline Ints add_ints(Ints a, Ints b) { return a + b; }
template <int BY>
inline Ints shift_right(Ints a) {
  return a >> BY;
}
template <int BY>
inline Ints shift_left(Ints a) {
  return a << BY;
}
inline Ints maximum_unsigned(Ints a, Ints b) { return a > b ? a : b; }
// The larger one of |a| and |b|; with AVX-512 a number rather than NaN.
inline Floats larger_magnitude(Floats a, Floats b) {
  return bits_float(maximum_unsigned(float_bits(a) & 0x7FFFFFFFu, float_bits(b) & 0x7FFFFFFFu));
}
// The smaller ones of the upper and of the lower 16 bits.
inline Ints minimum_halves(Ints a, Ints b) {
  const Ints low = (a & 0xFFFFu) < (b & 0xFFFFu) ? a : b, high = a >> 16 < b >> 16 ? a : b;
  return (high & 0xFFFF0000u) | (low & 0xFFFFu);
}
inline bool any_below(Ints a, uint32_t limit) { return a < limit; }
inline bool any_half_below(Ints a, uint32_t limit) { return (a & 0xFFFFu) < limit || a >> 16 < limit; }
// A bit for each lane whose lower half is below the limit.
inline uint32_t lower_halves_below(Ints a, uint32_t limit) { return (a & 0xFFFFu) < limit; }
inline uint32_t largest(Ints a) { return a; }

// Lane i is p[i / length].
inline Floats load_row_values(const float* p, int) { return *p; }
// Lane i is the largest of the lanes with the same i / length.
inline Ints largest_of_rows(Ints a, int) { return a; }

inline Floats in_turn(Floats a) { return a; }
// table[index & 7]
inline Floats lookup8(const float* table, Ints index) { return table[index & 7u]; }
// a with its sign flipped where that of test is set
inline Floats xor_sign(Floats a, Floats test) { return bits_float(float_bits(a) ^ (float_bits(test) & 0x80000000u)); }
// test != 0 or NaN ? a : 0
inline Floats keep_if_nonzero(Floats a, Floats test) { return test != 0.0f ? a : 0.0f; }
// x > y ? a : b
inline Floats if_greater(Floats x, Floats y, Floats a, Floats b) { return x > y ? a : b; }
// a + (x > y)
inline Ints add_if_greater(Ints a, Floats x, Floats y) { return a + (x > y); }
// ((bits(a) >> 16) - offset, not below 0) * 153 >> 16
inline Ints class_guess(Floats a, int32_t offset) {
  const uint32_t upper = float_bits(a) >> 16;
  return (upper > uint32_t(offset) ? upper - uint32_t(offset) : 0u) * 153u >> 16;
}

// 2^25 + 4 * code
inline Floats code_floats(const uint8_t* p) { return bits_float(0x4C000000u | *p); }
// Of the first `count` lanes; the others are 0, or have the code `rest`. One lane has no part.
template <class T>
inline Floats load_first(const T* p, int64_t) { return load_as(p); }
template <class T>
inline void store_first(T* p, Floats x, int64_t) { store_as(p, x); }
inline Floats code_floats_of_first(const uint8_t* p, int64_t, uint8_t) { return code_floats(p); }
// Codes of 4 vectors, and those of vector j among them.
using CodeGroup = const uint8_t*;
inline CodeGroup load_code_group(const uint8_t* p) { return p; }
inline Floats code_floats(CodeGroup group, int j) { return code_floats(group + j); }
// Codes of words as code_words() makes them, and of the signs of the values x they were made from.
struct Codes {
  uint8_t of[4];
};
inline Codes signed_codes(const Ints (&words)[4], const float* x) {
  Codes codes;
  for (int i = 0; i < 4; ++i) {
    const int m = int((words[i] >> 16) & 0xFFu), code = float_bits(x[i]) >> 31 ? 127 - m : 127 + m;
    codes.of[i] = uint8_t(code < 0 ? 0 : code);
  }
  return codes;
}
inline Codes unsigned_codes(const Ints (&words)[4]) {
  return {{uint8_t(words[0] >> 16), uint8_t(words[1] >> 16), uint8_t(words[2] >> 16), uint8_t(words[3] >> 16)}};
}
inline void store_codes(uint8_t* p, Codes codes) { memcpy(p, codes.of, 4); }
// Whether a half of a is below the limit or one of the codes 0.
inline bool any_half_below_or_zero(Ints a, uint32_t limit, Codes codes) {
  return any_half_below(a, limit) || !codes.of[0] || !codes.of[1] || !codes.of[2] || !codes.of[3];
}
// The codes, and 1 in the place of 0 where x is positive.
inline Codes positive_not_zero(Codes codes, const float* x) {
  for (int i = 0; i < 4; ++i)
    if (codes.of[i] == 0) codes.of[i] = x[i] > 0.0f;
  return codes;
}

}  // namespace
}  // namespace halfbyte::cpu::optimizer

#include "optimizer_class.h"
