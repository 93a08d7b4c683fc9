// Philox 4x32 in the 64-bit lanes of AVX-512, and bits of what it draws.
#pragma once

#include "avx512.h"

namespace halfbyte::cpu {
namespace {

constexpr int kPhiloxLanes = 8;
constexpr int kPhiloxVectors = 4;  // at a time
using Wides = __m512i;
inline Wides wide_splat(uint32_t x) { return _mm512_set1_epi64(int64_t(x)); }
inline Wides wide_count(uint64_t first) { return _mm512_add_epi64(_mm512_set1_epi64(int64_t(first)), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7)); }
inline Wides wide_multiply(Wides a, Wides b) { return _mm512_mul_epu32(a, b); }
inline Wides wide_upper(Wides a) { return _mm512_srli_epi64(a, 32); }
inline Wides wide_xor(Wides a, Wides b, Wides c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
inline Wides wide_pack(Wides low, Wides high) { return _mm512_mask_mov_epi32(low, 0xAAAA, _mm512_slli_epi64(high, 32)); }
inline void wide_store_by_turns(void* p, Wides a, Wides b) {
  const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  _mm512_storeu_si512(p, _mm512_permutex2var_epi64(a, low, b));
  _mm512_storeu_si512(static_cast<__m512i*>(p) + 1, _mm512_permutex2var_epi64(a, high, b));
}

// Bit i: random[i] >= least, for 8 kPhiloxLanes numbers. least <= 65536.
inline void store_at_least(const uint16_t* random, uint32_t least, uint8_t* bits) {
  if (least > 65535) return (void)memset(bits, 0, 8);
  const __m512i limit = _mm512_set1_epi16(int16_t(least));
  const uint64_t low = _mm512_cmpge_epu16_mask(_mm512_loadu_si512(random), limit);
  const uint64_t result = low | uint64_t(_mm512_cmpge_epu16_mask(_mm512_loadu_si512(random + 32), limit)) << 32;
  memcpy(bits, &result, 8);
}

}  // namespace
}  // namespace halfbyte::cpu
