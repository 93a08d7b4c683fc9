// Vectors of codes and of int32 for int8_linear with AVX2, and AVX-VNNI where the file is compiled for it.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

constexpr int kBytes = 32;
using Bytes = __m256i;
typedef int32_t Int32s __attribute__((vector_size(32)));

inline Bytes load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_bytes(void* p, Bytes v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
// `count` bytes, then zeros.
inline Bytes load_first_bytes(const void* p, int64_t count) {
  uint8_t bytes[kBytes] = {};
  memcpy(bytes, p, size_t(count));
  return load_bytes(bytes);
}
inline Bytes splat_byte(uint8_t byte) { return _mm256_set1_epi8(int8_t(byte)); }
inline Bytes broadcast_unit(const float* p) { return _mm256_castps_si256(_mm256_broadcast_ss(p)); }
inline int32_t sum_of_lanes(Int32s v) {
  const auto sum = reinterpret_cast<__m256i>(v);
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
inline void sums_of_lanes(Int32s a, Int32s b, Int32s c, Int32s d, int32_t sums[4]) {
  const auto pairs = [](Int32s x, Int32s y) { return _mm256_hadd_epi32(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(y)); };
  const __m256i s = _mm256_hadd_epi32(pairs(a, b), pairs(c, d));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1)));
}

// Codes as int16.
inline Bytes widened(const void* codes) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(codes))); }
inline Int32s multiply_words(Bytes a, Bytes b) { return reinterpret_cast<Int32s>(_mm256_madd_epi16(a, b)); }

#if defined(__AVXVNNI__)
// The instruction itself: int8_vectors_avx512.h says why.
inline Int32s dot_unsigned_signed(Int32s sum, Bytes u, Bytes s) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u), "x"(s));
  return sum;
}
#endif

}  // namespace
}  // namespace halfbyte::cpu
