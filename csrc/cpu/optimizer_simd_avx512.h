// Vectors of 16 floats: the operations of optimizer_simd_scalar.h with AVX-512.
#pragma once

#include <immintrin.h>

#include "../dynamic_map.h"
#include "simd/scalar.h"

namespace halfbyte::cpu::optimizer {
namespace {

constexpr int kWidth = 16;
using Floats = __m512;
using Ints = __m512i;

inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Ints splat_bits(uint32_t x) { return _mm512_set1_epi32(int(x)); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats load_as(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load_as(const BFloat16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Floats load_as(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_as(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline void store_as(BFloat16* p, Floats x) {
  // vcvtneps2bf16 rounds to nearest even, quiets NaN and flushes subnormals, which are zero here already.
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
inline void store_as(Float16* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats square_root(Floats a) { return _mm512_sqrt_ps(a); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Ints bits(Floats a) { return _mm512_castps_si512(a); }
inline Floats from_bits(Ints a) { return _mm512_castsi512_ps(a); }
inline Floats int_to_float(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints truncated(Floats a) { return _mm512_cvttps_epi32(a); }
inline Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints bit_xor(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints sub_ints(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints shift_left(Ints a, Ints by) { return _mm512_sllv_epi32(a, by); }
template <int BY>
inline Ints shift_left(Ints a) {
  return _mm512_slli_epi32(a, BY);
}
template <int BY>
inline Ints shift_right(Ints a) {
  return _mm512_srli_epi32(a, BY);
}
inline Ints maximum_unsigned(Ints a, Ints b) { return _mm512_max_epu32(a, b); }
inline Ints minimum_unsigned(Ints a, Ints b) { return _mm512_min_epu32(a, b); }
inline uint32_t largest(Ints a) { return _mm512_reduce_max_epu32(a); }
inline bool any_below(Ints a, uint32_t limit) { return _mm512_cmplt_epu32_mask(a, splat_bits(limit)) != 0; }

inline Floats lookup8(const float* table, Ints index) {
  // Both halves hold the 8 entries, so bit 3 of the index does not matter.
  return _mm512_permutexvar_ps(index, _mm512_broadcast_f32x8(_mm256_loadu_ps(table)));
}
inline Floats keep_if_nonzero(Floats a, Floats test) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test, _mm512_setzero_ps(), _CMP_NEQ_UQ), a);
}
inline Ints keep_if_positive(Ints a, Floats test) {
  return _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(test, _mm512_setzero_ps(), _CMP_GT_OQ), a);
}
inline Ints negate_if_negative(Ints a, Floats test) {
  return _mm512_mask_sub_epi32(a, _mm512_movepi32_mask(_mm512_castps_si512(test)), _mm512_setzero_si512(), a);
}
inline Floats if_greater(Floats x, Floats y, Floats a, Floats b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), b, a);
}
inline Ints add_if_greater(Ints a, Floats x, Floats y) {
  return _mm512_mask_add_epi32(a, _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), a, _mm512_set1_epi32(1));
}
inline Ints class_guess(Floats a, int32_t offset) {
  // The upper half of each 32-bit lane is 0, so the 16-bit operations act on the lower half alone.
  const __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
  return _mm512_mulhi_epu16(_mm512_subs_epu16(upper, _mm512_set1_epi32(offset)), _mm512_set1_epi32(153));
}

inline Ints load_codes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Integers saturated to 0..255.
inline void store_codes(uint8_t* p, const Ints (&a)[4]) {
  for (int i = 0; i < 4; ++i) {
    const __m512i positive = _mm512_max_epi32(a[i], _mm512_setzero_si512());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16 * i), _mm512_cvtusepi32_epi8(positive));
  }
}

}  // namespace
}  // namespace halfbyte::cpu::optimizer
