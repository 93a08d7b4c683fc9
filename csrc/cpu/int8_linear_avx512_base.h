// Integer products by AVX-512 without VNNI: codes widened to int16, vpmaddwd adds pairs of exact products, as with AVX2. Included
// once per ISA, after linear_decode_avx512.h.
#pragma once

#include <immintrin.h>

#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

inline __m512i widened_codes(const uint8_t* codes) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
}

// Along K: 32 weights a step.
struct Int8Dot {
  static constexpr int kStep = 32;
  static constexpr int kWeightOffset = 0;
  using Code = int16_t;
  using Values = __m512i;
  using Sum = __m512i;
  static Sum zero() { return _mm512_setzero_si512(); }
  static Values weights(const uint8_t* codes) { return widened_codes(codes); }
  static Sum multiply_add(Values w, const Code* x, Sum sum) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(w, _mm512_loadu_si512(x)));
  }
  static int32_t total(Sum sum) { return _mm512_reduce_add_epi32(sum); }
};

// linear's micro-kernel on units of 2 codes as int16.
struct Int8Units {
  static constexpr int kUnitElements = 2;
  using Code = int16_t;
  using Values = __m512i;
  using Sum = __m512i;
  static Sum load_sums(const float* p) { return load(p); }
  static void store_sums(float* p, Sum v) { _mm512_storeu_si512(p, v); }
  static Values load(const float* p) { return _mm512_loadu_si512(p); }
  static Values broadcast(const float* p) {
    int32_t unit;
    memcpy(&unit, p, 4);
    return _mm512_set1_epi32(unit);
  }
  static Sum multiply_add(Values weight, Values x, Sum sum) { return _mm512_add_epi32(sum, _mm512_madd_epi16(weight, x)); }
  static void activations(const uint8_t* codes, Code* out) {
    out[0] = int8_t(codes[0]);
    out[1] = int8_t(codes[1]);
  }
  // 2 * count codes, widened, vectors of 16 units kStep floats apart, the last one filled up with zeros; returns 0: nothing is
  // offset.
  template <int64_t kStep>
  static int32_t weights(const uint8_t* codes, int64_t count, float* units) {
    int64_t u = 0;
    for (; u + 16 <= count; u += 16, units += kStep) _mm512_storeu_si512(units, widened_codes(codes + 2 * u));
    if (u < count) {
      const __mmask32 left = __mmask32((uint64_t(1) << (2 * (count - u))) - 1u);
      _mm512_storeu_si512(units, _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(left, codes + 2 * u)));
    }
    return 0;
  }
};

}  // namespace
}  // namespace halfbyte::cpu
