// Integer products by AVX-512 VNNI: vpdpbusd adds 4 products of an unsigned and a signed byte to each int32, without
// saturation. Codes are signed on both sides, so one side is stored as code + 128 and the other side's sum, times 128, is
// taken off the result. Included once per ISA, after linear_decode_avx512.h.
#pragma once

#include <immintrin.h>

#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

typedef int32_t IntVector __attribute__((vector_size(64)));

// The instruction itself: through the intrinsic, whose casts of the sum g++ 12 does not see through, every sum was stored
// and copied at each step, and the micro-kernel ran at half its speed.
inline IntVector dot_unsigned_signed(IntVector sum, __m512i u, __m512i s) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(s));
  return sum;
}

// Along K: 64 weights a step, made unsigned (one exclusive or for all tokens).
struct Int8Dot {
  static constexpr int kStep = 64;
  static constexpr int kWeightOffset = 128;
  using Code = int8_t;
  using Values = __m512i;
  using Sum = IntVector;
  static Sum zero() { return Sum{}; }
  static Values weights(const uint8_t* codes) { return _mm512_xor_si512(_mm512_loadu_si512(codes), _mm512_set1_epi8(int8_t(0x80))); }
  static Sum multiply_add(Values w, const Code* x, Sum sum) { return dot_unsigned_signed(sum, w, _mm512_loadu_si512(x)); }
  static int32_t total(Sum sum) { return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(sum)); }
};

// linear's micro-kernel on units of 4 codes; the activations are the unsigned side.
struct Int8Units {
  static constexpr int kUnitElements = 4;
  using Code = uint8_t;
  using Values = __m512i;
  using Sum = IntVector;
  static Sum load_sums(const float* p) {
    Sum v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static void store_sums(float* p, Sum v) { memcpy(p, &v, sizeof v); }
  static Values load(const float* p) { return _mm512_loadu_si512(p); }
  static Values broadcast(const float* p) {
    int32_t unit;
    memcpy(&unit, p, 4);
    return _mm512_set1_epi32(unit);
  }
  static Sum multiply_add(Values weight, Values x, Sum sum) { return dot_unsigned_signed(sum, x, weight); }
  static void activations(const uint8_t* codes, Code* out) {
    uint32_t unit;
    memcpy(&unit, codes, 4);
    unit ^= 0x80808080u;
    memcpy(out, &unit, 4);
  }
  // 4 * count codes as they are, vectors of 16 units kStep floats apart, the last one filled up with zeros; returns 128 times
  // their sum.
  template <int64_t kStep>
  static int32_t weights(const uint8_t* codes, int64_t count, float* units) {
    const __m512i offset = _mm512_set1_epi8(int8_t(0x80));  // 128, unsigned
    __m512i sum = _mm512_setzero_si512();
    int64_t u = 0;
    for (; u + 16 <= count; u += 16, units += kStep) {
      const __m512i w = _mm512_loadu_si512(codes + 4 * u);
      _mm512_storeu_si512(units, w);
      sum = _mm512_dpbusd_epi32(sum, offset, w);
    }
    if (u < count) {
      const __mmask16 left = __mmask16((1u << (count - u)) - 1u);
      const __m512i w = _mm512_maskz_loadu_epi32(left, codes + 4 * u);
      _mm512_storeu_si512(units, w);
      sum = _mm512_dpbusd_epi32(sum, offset, w);
    }
    return _mm512_reduce_add_epi32(sum);
  }
};

}  // namespace
}  // namespace halfbyte::cpu
