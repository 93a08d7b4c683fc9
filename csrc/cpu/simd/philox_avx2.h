// Philox 4x32 in the 64-bit lanes of AVX2, and bits of what it draws.
#pragma once

#include "avx2.h"

namespace halfbyte::cpu {
namespace {

constexpr int kPhiloxLanes = 4;
constexpr int kPhiloxVectors = 2;  // at a time
using Wides = __m256i;
inline Wides wide_splat(uint32_t x) { return _mm256_set1_epi64x(int64_t(x)); }
inline Wides wide_count(uint64_t first) { return _mm256_add_epi64(_mm256_set1_epi64x(int64_t(first)), _mm256_setr_epi64x(0, 1, 2, 3)); }
inline Wides wide_multiply(Wides a, Wides b) { return _mm256_mul_epu32(a, b); }
inline Wides wide_upper(Wides a) { return _mm256_srli_epi64(a, 32); }
inline Wides wide_xor(Wides a, Wides b, Wides c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
inline Wides wide_pack(Wides low, Wides high) { return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xAA); }
inline void wide_store_by_turns(void* p, Wides a, Wides b) {
  const __m256i even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, _mm256_permute2x128_si256(even, odd, 0x31));
}

// Bit i: random[i] >= least, for 8 kPhiloxLanes numbers. least <= 65536.
inline void store_at_least(const uint16_t* random, uint32_t least, uint8_t* bits) {
  if (least > 65535) return (void)memset(bits, 0, 4);
  const __m256i limit = _mm256_set1_epi16(int16_t(least));
  const auto reached = [&](const uint16_t* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_cmpeq_epi16(_mm256_max_epu16(x, limit), x);
  };
  const __m256i both = _mm256_packs_epi16(reached(random), reached(random + 16));  // lower halves of both, then upper halves
  const int32_t result = _mm256_movemask_epi8(_mm256_permute4x64_epi64(both, 0xD8));
  memcpy(bits, &result, 4);
}

}  // namespace
}  // namespace halfbyte::cpu
