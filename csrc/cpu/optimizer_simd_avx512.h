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
inline void store_pair_as(BFloat16* p, Floats a, Floats b) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
}
inline void store_as(Float16* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
template <class T>
inline void store_pair_as(T* p, Floats a, Floats b) {
  store_as(p, a);
  store_as(p + kWidth, b);
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
inline Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints bit_xor(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints sub_ints(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
template <int BY>
inline Ints shift_right(Ints a) {
  return _mm512_srli_epi32(a, BY);
}
inline Ints maximum_unsigned(Ints a, Ints b) { return _mm512_max_epu32(a, b); }
inline Ints minimum_halves(Ints a, Ints b) { return _mm512_min_epu16(a, b); }
inline bool any_below(Ints a, uint32_t limit) { return _mm512_cmplt_epu32_mask(a, splat_bits(limit)) != 0; }
inline bool any_half_below(Ints a, uint32_t limit) {
  return _mm512_cmplt_epu16_mask(a, _mm512_set1_epi16(int16_t(limit))) != 0;
}
inline uint32_t largest(Ints a) { return _mm512_reduce_max_epu32(a); }

inline Floats lookup8(const float* table, Ints index) {
  // The table holds its 8 entries twice, so bit 3 of the index does not matter.
  return _mm512_permutexvar_ps(index, _mm512_load_ps(table));
}
inline Floats xor_sign(Floats a, Floats test) {
  return from_bits(_mm512_ternarylogic_epi32(bits(a), bits(test), splat_bits(0x80000000u), 0x78));  // a ^ (test & sign)
}
inline Floats fma_if_nonzero(Floats test, Floats b, Floats c) {
  return _mm512_maskz_fmadd_ps(_mm512_test_epi32_mask(bits(test), bits(test)), test, b, c);
}
inline Floats keep_if_nonzero(Floats a, Floats test) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test, _mm512_setzero_ps(), _CMP_NEQ_UQ), a);
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
// Byte BYTE of every lane of 4 vectors.
template <int BYTE>
inline __m512i byte_of_each(const __m512i& a, const __m512i& b, const __m512i& c, const __m512i& d) {
  // Where 32 lanes of two vectors keep it.
  alignas(64) static constexpr auto kPlaces = [] {
    struct {
      uint8_t at[64];
    } places{};
    for (int i = 0; i < 64; ++i) places.at[i] = uint8_t(4 * (i % 32) + BYTE);
    return places;
  }();
  const __m512i places = _mm512_load_si512(kPlaces.at);
  return _mm512_inserti64x4(_mm512_permutex2var_epi8(a, places, b),
                            _mm512_castsi512_si256(_mm512_permutex2var_epi8(c, places, d)), 1);
}
inline void store_signed_codes(uint8_t* p, const Ints (&words)[4], const float* x) {
  const __m512i m = byte_of_each<2>(words[0], words[1], words[2], words[3]);
  const __mmask64 negative = _mm512_movepi8_mask(
      byte_of_each<3>(bits(load(x)), bits(load(x + 16)), bits(load(x + 32)), bits(load(x + 48))));
  const __m512i zero = _mm512_set1_epi8(127);
  _mm512_storeu_si512(p, _mm512_mask_subs_epu8(_mm512_add_epi8(zero, m), negative, zero, m));
}
inline void store_unsigned_codes(uint8_t* p, const Ints (&words)[4], const float* x) {
  const __m512i code = byte_of_each<2>(words[0], words[1], words[2], words[3]);
  // Saturation turns the bits of positive floats into 127; 0 stays 0.
  const __m512i low = _mm512_packs_epi32(bits(load(x)), bits(load(x + 16)));
  const __m512i high = _mm512_packs_epi32(bits(load(x + 32)), bits(load(x + 48)));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i positive = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
  const __m512i least = _mm512_min_epu8(positive, _mm512_set1_epi8(1));
  _mm512_storeu_si512(p, _mm512_max_epu8(code, least));
}

}  // namespace
}  // namespace halfbyte::cpu::optimizer
