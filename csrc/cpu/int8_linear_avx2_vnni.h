// Integer products by AVX-VNNI, which CPUs without AVX-512 have as well (Intel's clients since Alder Lake): vpdpbusd as in
// int8_linear_avx512.h, on half the width. Included once per ISA, after linear_decode_avx2.h.
#pragma once

#include <immintrin.h>

#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

typedef int32_t IntVector __attribute__((vector_size(32)));

// The instruction itself, for the reason that int8_linear_avx512.h gives.
inline IntVector dot_unsigned_signed(IntVector sum, __m256i u, __m256i s) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u), "x"(s));
  return sum;
}

inline int32_t sum_of_lanes(IntVector v) {
  const auto sum = reinterpret_cast<__m256i>(v);
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Along K: 32 weights a step, made unsigned (one exclusive or for all tokens).
struct Int8Dot {
  static constexpr int kStep = 32;
  static constexpr int kWeightOffset = 128;
  using Code = int8_t;
  using Values = __m256i;
  using Sum = IntVector;
  static Sum zero() { return Sum{}; }
  static Values weights(const uint8_t* codes) { return _mm256_xor_si256(load_bytes(codes), _mm256_set1_epi8(int8_t(0x80))); }
  static Sum multiply_add(Values w, const Code* x, Sum sum) { return dot_unsigned_signed(sum, w, load_bytes(x)); }
  static int32_t total(Sum sum) { return sum_of_lanes(sum); }
};

// linear's micro-kernel on units of 4 codes; the activations are the unsigned side.
struct Int8Units {
  static constexpr int kUnitElements = 4;
  using Code = uint8_t;
  using Values = __m256i;
  using Sum = IntVector;
  static Sum load_sums(const float* p) {
    Sum v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static void store_sums(float* p, Sum v) { memcpy(p, &v, sizeof v); }
  static Values load(const float* p) { return load_bytes(p); }
  static Values broadcast(const float* p) { return _mm256_castps_si256(_mm256_broadcast_ss(p)); }
  static Sum multiply_add(Values weight, Values x, Sum sum) { return dot_unsigned_signed(sum, x, weight); }
  static void activations(const uint8_t* codes, Code* out) {
    uint32_t unit;
    memcpy(&unit, codes, 4);
    unit ^= 0x80808080u;
    memcpy(out, &unit, 4);
  }
  // 4 * count codes as they are, the last vector filled up with zeros; returns 128 times their sum.
  template <int64_t kStep>
  static int32_t weights(const uint8_t* codes, int64_t count, float* units) {
    static_assert(kStep == kLanes);
    const __m256i offset = _mm256_set1_epi8(int8_t(0x80));  // 128, unsigned
    IntVector sum{};
    const auto put = [&](__m256i w) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(units), w);
      sum = dot_unsigned_signed(sum, offset, w);
      units += kLanes;
    };
    int64_t u = 0;
    for (; u + kLanes <= count; u += kLanes) put(load_bytes(codes + 4 * u));
    if (u < count) {
      uint8_t left[32] = {};
      memcpy(left, codes + 4 * u, size_t(4 * (count - u)));
      put(load_bytes(left));
    }
    return sum_of_lanes(sum);
  }
};

}  // namespace
}  // namespace halfbyte::cpu
