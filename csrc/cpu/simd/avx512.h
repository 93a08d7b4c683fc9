// Vectors of 16 floats for AVX-512 (F, BW, VL, DQ): exact loads and conversions of every element type, non-temporal
// stores. vcvtneps2bf16 is not used: it flushes subnormals, which the rules keep.
#pragma once

// GCC 12 and 13 warn about the deliberately undefined operands inside their own header (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "scalar.h"

namespace halfbyte::cpu {
namespace {

inline __m512 load_floats(const float* x) { return _mm512_loadu_ps(x); }
inline __m512 widen_bf16(__m256i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16)); }
inline __m512 load_floats(const BFloat16* x) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
inline __m512 load_floats(const Float16* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

// Floats rounded to bf16, nearest even, in the high word of each dword (the low word is waste). NaN must be canonical
// (kNaNBits): the carry out of a full mantissa would turn another NaN into -0.
inline __m512i round_bf16(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
}

// The upper words of 32 dwords.
inline __m512i upper_words(__m512i low, __m512i high) {
  const __m512i places = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
                                          31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(low, places, high);
}

// 32 floats -> 32 words of T (BFloat16 or Float16), nearest even. NaN as for round_bf16.
template <class T>
inline __m512i narrow_floats(__m512 low, __m512 high);
template <>
inline __m512i narrow_floats<BFloat16>(__m512 low, __m512 high) {
  return upper_words(round_bf16(low), round_bf16(high));
}
template <>
inline __m512i narrow_floats<Float16>(__m512 low, __m512 high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT)),
                            _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT), 1);
}

// 16 floats whose NaN are those that narrow_floats and narrow_pairs round as from_float does.
template <class T>
inline __m512 narrowable(__m512 v) {
  const __m512i kept = _mm512_set1_epi32(int32_t(kNaNKept<T>)), set = _mm512_set1_epi32(int32_t(kNaNSet<T>));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_castsi512_ps(_mm512_mask_ternarylogic_epi32(_mm512_castps_si512(v), nan, kept, set, 0xEA));  // (v & kept) | set
}

// 32 floats, rounded as from_float does, NaN included.
template <class T>
inline void store_rounded(T* out, __m512 low, __m512 high) {
  _mm512_storeu_si512(out, narrow_floats<T>(narrowable<T>(low), narrowable<T>(high)));
}
template <>
inline void store_rounded<float>(float* out, __m512 low, __m512 high) {
  _mm512_storeu_ps(out, low);
  _mm512_storeu_ps(out + 16, high);
}

// 2 x 16 floats -> dwords of T, `even`'s in the low words. NaN as for round_bf16.
template <class T>
inline __m512i narrow_pairs(__m512 even, __m512 odd);
template <>
inline __m512i narrow_pairs<BFloat16>(__m512 even, __m512 odd) {
  return _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_srli_epi32(round_bf16(even), 16), round_bf16(odd));
}
template <>
inline __m512i narrow_pairs<Float16>(__m512 even, __m512 odd) {
  const auto dwords = [](__m512 v) { return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); };
  return _mm512_or_si512(dwords(even), _mm512_slli_epi32(dwords(odd), 16));
}

constexpr int64_t kStreamAlignment = 64;

template <bool Stream>
inline void store_vector(void* target, __m512i v) {
  if (Stream) {
    _mm512_stream_si512(static_cast<__m512i*>(target), v);
  } else {
    _mm512_storeu_si512(target, v);
  }
}

inline __m512i load_vector(const void* source) { return _mm512_loadu_si512(source); }

}  // namespace
}  // namespace halfbyte::cpu

#include "stream.h"
