// Vectors of codes and of int32 for int8_linear with AVX-512, and VNNI where the file is compiled for it.
#pragma once

#include <immintrin.h>

#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

constexpr int kBytes = 64;
using Bytes = __m512i;
typedef int32_t Int32s __attribute__((vector_size(64)));

inline Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(void* p, Bytes v) { _mm512_storeu_si512(p, v); }
// `count` bytes, then zeros.
inline Bytes load_first_bytes(const void* p, int64_t count) {
  return _mm512_maskz_loadu_epi8(__mmask64((uint64_t(1) << count) - 1u), p);
}
inline Bytes splat_byte(uint8_t byte) { return _mm512_set1_epi8(int8_t(byte)); }
inline Bytes broadcast_unit(const float* p) { return _mm512_castps_si512(_mm512_set1_ps(*p)); }
// Modulo 2^32, as VNNI's biased products need it: _mm512_reduce_add_epi32 adds signed numbers, whose overflow is undefined.
inline int32_t sum_of_lanes(Int32s v) {
  const auto sum = reinterpret_cast<__m512i>(v);
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
inline void sums_of_lanes(Int32s a, Int32s b, Int32s c, Int32s d, int32_t sums[4]) {
  const auto add = [](__m512i x, __m512i y) { return _mm512_add_epi32(x, y); };
  const auto halves = [&](Int32s x, Int32s y) {
    const auto v = reinterpret_cast<__m512i>(x), w = reinterpret_cast<__m512i>(y);
    return add(_mm512_shuffle_i32x4(v, w, 0x44), _mm512_shuffle_i32x4(v, w, 0xEE));
  };
  const __m512i ab = halves(a, b), cd = halves(c, d);
  __m512i s = add(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xDD));
  s = add(s, _mm512_shuffle_epi32(s, _MM_PERM_BADC));
  s = add(s, _mm512_shuffle_epi32(s, _MM_PERM_CDAB));
  const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), _mm512_castsi512_si128(_mm512_permutexvar_epi32(firsts, s)));
}

// Codes as int16.
inline Bytes widened(const void* codes) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(codes))); }
inline Int32s multiply_words(Bytes a, Bytes b) { return reinterpret_cast<Int32s>(_mm512_madd_epi16(a, b)); }

#if defined(__AVX512VNNI__)
// The instruction itself: through the intrinsic, whose casts of the sum g++ 12 does not see through, every sum was stored and copied at
// each step, and the micro-kernel ran at half its speed.
inline Int32s dot_unsigned_signed(Int32s sum, Bytes u, Bytes s) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(s));
  return sum;
}
#endif

}  // namespace
}  // namespace halfbyte::cpu
