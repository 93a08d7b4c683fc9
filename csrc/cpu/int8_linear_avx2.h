// Integer products by AVX2: codes widened to int16, vpmaddwd adds pairs of exact products (2 * 127 * 128 fits easily).
// vpmaddubsw would take bytes, but saturates its pairs at 2^15. Included once per ISA, after linear_decode_avx2.h.
#pragma once

#include <immintrin.h>

#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

// Along K: 16 weights a step.
struct Int8Dot {
  static constexpr int kStep = 16;
  static constexpr int kWeightOffset = 0;
  using Code = int16_t;
  using Values = __m256i;
  using Sum = __m256i;
  static Sum zero() { return _mm256_setzero_si256(); }
  static Values weights(const uint8_t* codes) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  }
  static Sum multiply_add(Values w, const Code* x, Sum sum) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(w, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
  }
  static int32_t total(Sum sum) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
  }
};

// linear's micro-kernel on units of 2 codes as int16.
struct Int8Units {
  static constexpr int kUnitElements = 2;
  using Code = int16_t;
  using Values = __m256i;
  using Sum = __m256i;
  static Sum load_sums(const float* p) { return load(p); }
  static void store_sums(float* p, Sum v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static Values load(const float* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Values broadcast(const float* p) { return _mm256_castps_si256(_mm256_broadcast_ss(p)); }
  static Sum multiply_add(Values weight, Values x, Sum sum) { return _mm256_add_epi32(sum, _mm256_madd_epi16(weight, x)); }
  static void activations(const uint8_t* codes, Code* out) {
    out[0] = int8_t(codes[0]);
    out[1] = int8_t(codes[1]);
  }
  // 2 * count codes, widened; returns 0: nothing is offset.
  template <int64_t kStep>
  static int32_t weights(const uint8_t* codes, int64_t count, float* units) {
    static_assert(kStep == kLanes);
    auto* out = reinterpret_cast<__m256i*>(units);
    int64_t u = 0;
    for (; u + 8 <= count; u += 8, ++out)
      _mm256_storeu_si256(out, _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 2 * u))));
    for (; u < count; ++u) {
      const int16_t pair[2] = {int8_t(codes[2 * u]), int8_t(codes[2 * u + 1])};
      memcpy(units + u, pair, 4);
    }
    return 0;
  }
};

}  // namespace
}  // namespace halfbyte::cpu
