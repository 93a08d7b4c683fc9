// Vectors of one float, for CPUs without a vector form. The same operations as the other optimizer_simd_*.h, so that
// results agree bit for bit.
#pragma once

#include "../dynamic_map.h"
#include "simd/scalar.h"

namespace halfbyte::cpu::optimizer {
namespace {

constexpr int kWidth = 1;
using Floats = float;
using Ints = uint32_t;

inline Floats splat(float x) { return x; }
inline Ints splat_bits(uint32_t x) { return x; }
inline Floats load(const float* p) { return *p; }
inline void store(float* p, Floats x) { *p = x; }
inline Floats load_as(const float* p) { return *p; }
inline Floats load_as(const BFloat16* p) { return to_float(*p); }
inline Floats load_as(const Float16* p) { return to_float(*p); }
template <class T>
inline void store_as(T* p, Floats x) {
  *p = from_float<T>(x);
}

inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats mul(Floats a, Floats b) { return a * b; }
inline Floats divide(Floats a, Floats b) { return a / b; }
inline Floats square_root(Floats a) { return sqrtf(a); }
inline Floats fma(Floats a, Floats b, Floats c) { return fmaf(a, b, c); }
inline Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
inline Ints bits(Floats a) { return float_bits(a); }
inline Floats from_bits(Ints a) { return bits_float(a); }
inline Floats int_to_float(Ints a) { return float(int32_t(a)); }
inline Ints truncated(Floats a) { return uint32_t(int32_t(a)); }
inline Ints bit_and(Ints a, Ints b) { return a & b; }
inline Ints bit_xor(Ints a, Ints b) { return a ^ b; }
inline Ints add_ints(Ints a, Ints b) { return a + b; }
inline Ints sub_ints(Ints a, Ints b) { return a - b; }
inline Ints shift_left(Ints a, Ints by) { return a << by; }
template <int BY>
inline Ints shift_left(Ints a) {
  return a << BY;
}
template <int BY>
inline Ints shift_right(Ints a) {
  return a >> BY;
}
inline Ints maximum_unsigned(Ints a, Ints b) { return a > b ? a : b; }
inline Ints minimum_unsigned(Ints a, Ints b) { return a < b ? a : b; }
inline uint32_t largest(Ints a) { return a; }
inline bool any_below(Ints a, uint32_t limit) { return a < limit; }

// table[index & 7]
inline Floats lookup8(const float* table, Ints index) { return table[index & 7u]; }
// test != 0 or NaN ? a : 0
inline Floats keep_if_nonzero(Floats a, Floats test) { return test != 0.0f ? a : 0.0f; }
// test > 0 ? a : 0
inline Ints keep_if_positive(Ints a, Floats test) { return test > 0.0f ? a : 0u; }
// test < 0 (by its sign bit) ? -a : a
inline Ints negate_if_negative(Ints a, Floats test) { return float_bits(test) >> 31 ? 0u - a : a; }
// x > y ? a : b
inline Floats if_greater(Floats x, Floats y, Floats a, Floats b) { return x > y ? a : b; }
// a + (x > y)
inline Ints add_if_greater(Ints a, Floats x, Floats y) { return a + (x > y); }
// ((bits(a) >> 16) - offset, not below 0) * 153 >> 16
inline Ints class_guess(Floats a, int32_t offset) {
  const uint32_t upper = float_bits(a) >> 16;
  return (upper > uint32_t(offset) ? upper - uint32_t(offset) : 0u) * 153u >> 16;
}

inline Ints load_codes(const uint8_t* p) { return *p; }
// Integers saturated to 0..255.
inline void store_codes(uint8_t* p, const Ints (&a)[4]) {
  for (int i = 0; i < 4; ++i) p[i] = int32_t(a[i]) < 0 ? uint8_t(0) : uint8_t(a[i] > 255u ? 255u : a[i]);
}

}  // namespace
}  // namespace halfbyte::cpu::optimizer
