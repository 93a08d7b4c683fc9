// Vectors of 8 floats for AVX2 + FMA + F16C: exact loads and conversions of every element type, non-temporal stores.
#pragma once

#include <immintrin.h>

#include "scalar.h"

namespace halfbyte::cpu {
namespace {

inline __m256 load_floats(const float* x) { return _mm256_loadu_ps(x); }
inline __m256 load_floats(const BFloat16* x) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  const __m256i places = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                          -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  return _mm256_castsi256_ps(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(words), places));
}
inline __m256 load_floats(const Float16* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

// Floats rounded to bf16, nearest even, in the high word of each dword (the low word is waste). NaN must be canonical
// (kNaNBits): the carry out of a full mantissa would turn another NaN into -0.
inline __m256i round_bf16(__m256 v, __m256i lowest_kept = _mm256_set1_epi32(0x10000), __m256i below_half = _mm256_set1_epi32(0x7FFF)) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_cmpeq_epi32(_mm256_and_si256(bits, lowest_kept), lowest_kept);
  return _mm256_sub_epi32(_mm256_add_epi32(bits, below_half), odd);
}

// The upper words of 16 dwords, in order. Nothing is shifted, here or above: Zen 2 does so in one of its units alone.
inline __m256i upper_words(__m256i low, __m256i high) {
  const __m256i first = _mm256_broadcastsi128_si256(_mm_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m256i second = _mm256_broadcastsi128_si256(_mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 2, 3, 6, 7, 10, 11, 14, 15));
  return _mm256_permute4x64_epi64(_mm256_or_si256(_mm256_shuffle_epi8(low, first), _mm256_shuffle_epi8(high, second)), 0xD8);
}

// 16 floats -> 16 words of T (BFloat16 or Float16), in order. NaN as for round_bf16.
template <class T>
inline __m256i narrow_floats(__m256 low, __m256 high);
template <>
inline __m256i narrow_floats<BFloat16>(__m256 low, __m256 high) {
  return upper_words(round_bf16(low), round_bf16(high));
}
template <>
inline __m256i narrow_floats<Float16>(__m256 low, __m256 high) {
  return _mm256_set_m128i(_mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT), _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
}

// 8 floats whose NaN are those that narrow_floats and narrow_pairs round as from_float does.
template <class T>
inline __m256 narrowable(__m256 v) {
  const __m256 kept = _mm256_castsi256_ps(_mm256_set1_epi32(int32_t(kNaNKept<T>)));
  const __m256 set = _mm256_castsi256_ps(_mm256_set1_epi32(int32_t(kNaNSet<T>)));
  return _mm256_blendv_ps(v, _mm256_or_ps(_mm256_and_ps(v, kept), set), _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

// 16 floats, rounded as from_float does, NaN included.
template <class T>
inline void store_rounded(T* out, __m256 low, __m256 high) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), narrow_floats<T>(narrowable<T>(low), narrowable<T>(high)));
}
template <>
inline void store_rounded<float>(float* out, __m256 low, __m256 high) {
  _mm256_storeu_ps(out, low);
  _mm256_storeu_ps(out + 8, high);
}

// 2 x 8 floats -> dwords of T, `even`'s in the low words. NaN as for round_bf16.
template <class T>
inline __m256i narrow_pairs(__m256 even, __m256 odd);
template <>
inline __m256i narrow_pairs<BFloat16>(__m256 even, __m256 odd) {
  return _mm256_blend_epi16(_mm256_srli_epi32(round_bf16(even), 16), round_bf16(odd), 0xAA);
}
template <>
inline __m256i narrow_pairs<Float16>(__m256 even, __m256 odd) {
  const auto dwords = [](__m256 v) { return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); };
  return _mm256_or_si256(dwords(even), _mm256_slli_epi32(dwords(odd), 16));
}

constexpr int64_t kStreamAlignment = 32;

template <bool Stream>
inline void store_vector(void* target, __m256i v) {
  if (Stream) {
    _mm256_stream_si256(static_cast<__m256i*>(target), v);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(target), v);
  }
}

inline __m256i load_vector(const void* source) { return _mm256_loadu_si256(static_cast<const __m256i*>(source)); }

}  // namespace
}  // namespace halfbyte::cpu

#include "stream.h"
