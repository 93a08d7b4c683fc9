// Arithmetic of the 8-bit optimizers for one element, host and device: the dynamic map, the update rules, stochastic
// rounding. The rules are those of halfbyte/reference_optimizer.py: fp32, one rounding per operation, subnormal numbers
// are zero. On the device that is the .ftz form of each instruction, spelled in PTX so that no compiler flag decides it.
#pragma once

#include "../optimizer.h"
#include "elements.h"

namespace halfbyte::cuda {

#if defined(__CUDA_ARCH__)
__device__ inline float mul_ftz(float a, float b) {
  float r;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ inline float fma_ftz(float a, float b, float c) {
  float r;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}
__device__ inline float div_ftz(float a, float b) {
  float r;
  asm("div.rn.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ inline float sqrt_ftz(float a) {
  float r;
  asm("sqrt.rn.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}
#else
inline float flush(float v) { return (float_bits(v) & 0x7F800000u) == 0 ? bits_float(float_bits(v) & 0x80000000u) : v; }
HALFBYTE_HD inline float mul_ftz(float a, float b) { return flush(flush(a) * flush(b)); }
HALFBYTE_HD inline float fma_ftz(float a, float b, float c) { return flush(__builtin_fmaf(flush(a), flush(b), flush(c))); }
HALFBYTE_HD inline float div_ftz(float a, float b) { return flush(flush(a) / flush(b)); }
HALFBYTE_HD inline float sqrt_ftz(float a) { return __builtin_sqrtf(flush(a)); }
#endif

// ---- the dynamic map (dynamic_map.h) ----

HALFBYTE_HD inline float decode_signed(const DynamicMap& map, uint32_t code) {
  const float d = float(int32_t(code) - 127);
  const uint32_t e = (float_bits(d) >> 23) & 7u, sign = float_bits(d) & 0x80000000u;
  const float value = fma_ftz(d, map.B[e], bits_float(float_bits(map.A[e]) ^ sign));
  return d != 0.0f ? value : 0.0f;
}

HALFBYTE_HD inline float decode_unsigned(const DynamicMap& map, uint32_t code) {
  const float m = float(code + 1);
  const uint32_t e = (float_bits(m) >> 23) & 7u;
  return fma_ftz(m, map.B[e], map.A[e]);
}

// The encoder's classes by the exponent of a magnitude, which is at most about 1: a power of two to the next holds one boundary
// of classes at most. Neighbouring exponents lie in neighbouring banks.
constexpr int kExponents = 128;
struct ClassTables {
  float above[kExponents];      // a > above: the class after `first`
  float J[2][kExponents];       // of the class `first`, and of the one after it
  uint32_t first[kExponents];
};
HALFBYTE_HD inline void fill_classes(ClassTables& tables, const DynamicMap& map, uint32_t exponent) {
  uint32_t c = 0;
  while (c < 7 && bits_float(exponent << 23) > map.above[c]) ++c;
  const bool ends = c < 7 && (float_bits(map.above[c]) >> 23) == exponent;
  tables.above[exponent] = ends ? map.above[c] : 3e38f;
  tables.J[0][exponent] = map.J[c];
  tables.J[1][exponent] = map.J[ends ? c + 1 : c];
  tables.first[exponent] = c;
}

// Magnitude of 0 <= a <= 1.0000001; `near` is set where a lies within a few ulps of a midpoint, and the caller must settle it.
template <bool SIGNED>
HALFBYTE_HD inline uint32_t magnitude_of(const ClassTables& tables, float a, bool& near) {
  constexpr uint32_t kFirst = SIGNED ? 0 : 1;
  const uint32_t exponent = float_bits(a) >> 23;
  const bool next = a > tables.above[exponent];
  const float low = tables.J[0][exponent], high = tables.J[1][exponent];
  const uint32_t c = tables.first[exponent] + (next ? 1u : 0u);
  const float w = fma_ftz(a, next ? high : low, float(8.0 / 9.0));
  const uint32_t fraction = float_bits(w) << ((c + 9 + kFirst) & 31u);
  near = near || fraction + kNearTie < 2 * kNearTie;
  float clamped = w < 1.99999988f ? w : 1.99999988f;
  if (!SIGNED) clamped = clamped > 1.0f ? clamped : 1.0f;  // positive second moments are at least m = 2
  return uint32_t(int32_t(bits_float(float_bits(clamped) + ((c + kFirst) << 23))));
}

// m against the exact midpoints.
template <bool SIGNED>
HALFBYTE_HD inline uint32_t settle(const float* midpoint, float a, uint32_t m, bool negative) {
  const uint32_t low = SIGNED ? 0 : 2, high = SIGNED ? (negative ? 127 : 128) : 256;
  while (m < high && a > midpoint[m]) ++m;
  while (m > low && !(a > midpoint[m - 1])) --m;
  return m;
}

// What a block is encoded with: x * prescale * factor are its normalized values.
struct BlockEncoder {
  float scale, prescale, factor;
  bool coded;  // false: an all-zero block
};
HALFBYTE_HD inline BlockEncoder block_encoder(uint32_t absmax_bits) {
  if (absmax_bits == 0) return {0.0f, 1.0f, 0.0f, false};
  const float scale = bits_float(absmax_bits);
  const float prescale = scale > 0x1p126f ? 0.25f : 1.0f;  // the reciprocal would be subnormal, that is 0
  return {scale, prescale, div_ftz(1.0f, mul_ftz(scale, prescale)), true};
}

// The code of magnitude m for a (prescaled) value; an unsigned one of what is not positive is 0.
template <bool SIGNED>
HALFBYTE_HD inline uint32_t code_of(uint32_t m, float x) {
  if (!SIGNED) return x >= 0x1p-126f ? (m < 256u ? m : 256u) - 1u : 0u;
  const int32_t code = float_bits(x) >> 31 ? 127 - int32_t(m) : 127 + int32_t(m);
  return uint32_t(code < 0 ? 0 : code > 255 ? 255 : code);
}

// The codes of values of one block. Ties, and scales whose reciprocal would be subnormal, are rare: branches for all values.
template <bool SIGNED, int COUNT>
HALFBYTE_HD inline void encode_moments(const ClassTables& tables, const float* midpoint, const BlockEncoder& block,
                                       const float (&x)[COUNT], uint32_t (&codes)[COUNT]) {
  float value[COUNT];
  bool near = false;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < COUNT; ++i) value[i] = x[i];
  if (block.prescale != 1.0f) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < COUNT; ++i) value[i] = mul_ftz(x[i], block.prescale);
  }
  const auto normalized = [&](float v) { return mul_ftz(fabsf(v), block.factor); };
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < COUNT; ++i) codes[i] = magnitude_of<SIGNED>(tables, normalized(value[i]), near);
  if (near) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < COUNT; ++i) codes[i] = settle<SIGNED>(midpoint, normalized(value[i]), codes[i], float_bits(x[i]) >> 31);
  }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < COUNT; ++i) codes[i] = !block.coded ? (SIGNED ? 127u : 0u) : code_of<SIGNED>(codes[i], value[i]);
}

// ---- the rules ----

struct Updated {
  float param, first, second;
};

// One element. first and second are map values, first_scale and second_scale the scales their blocks were stored with.
template <OptimizerRule RULE>
HALFBYTE_HD inline Updated update_element(const OptimizerScalars& s, float param, float grad, float first, float first_scale,
                                          float second, float second_scale) {
  float g = mul_ftz(grad, s.grad_factor);
  if constexpr (RULE == OptimizerRule::kAdam || RULE == OptimizerRule::kSGD) {
    if (s.weight_decay != 0.0f) g = fma_ftz(s.weight_decay, param, g);
  }
  Updated out{};
  out.first = fma_ftz(first, mul_ftz(first_scale, s.first_keep), mul_ftz(g, s.first_take));
  if constexpr (RULE == OptimizerRule::kAdamW || RULE == OptimizerRule::kAdam) {
    out.second = fma_ftz(second, mul_ftz(second_scale, s.second_keep), mul_ftz(mul_ftz(g, g), s.second_take));
    const float ratio = div_ftz(out.first, fma_ftz(sqrt_ftz(out.second), s.second_factor, s.eps));
    out.param = fma_ftz(-s.step_size, ratio, RULE == OptimizerRule::kAdamW ? mul_ftz(param, s.decay) : param);
  } else if constexpr (RULE == OptimizerRule::kLion) {
    const float mixed = fma_ftz(first, mul_ftz(first_scale, s.second_keep), mul_ftz(g, s.second_take));
    const float one = bits_float(0x3F800000u | (float_bits(mixed) & 0x80000000u));
    // 0 * mixed makes the update NaN where the gradient is not finite: a sign alone would hide it.
    const float sign = fma_ftz(mixed, 0.0f, mixed != 0.0f ? one : 0.0f);
    out.param = fma_ftz(-s.step_size, sign, mul_ftz(param, s.decay));
  } else {
    out.param = fma_ftz(-s.step_size, s.nesterov ? fma_ftz(s.momentum, out.first, g) : out.first, param);
  }
  return out;
}

// Moments that are not both finite start over, and leave their block's scales alone.
HALFBYTE_HD inline void restart_unless_finite(float& first, float& second) {
  if (!is_finite(first) || !is_finite(second)) first = second = 0.0f;
}

// ---- stochastic rounding: by (seed, step, global element index) alone ----

// Philox 4x32-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405).
struct Philox {
  uint32_t word0, word1, word2, word3;
};
HALFBYTE_HD inline Philox philox(uint64_t counter, uint32_t step, uint64_t seed) {
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = step, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// 16 bits of element `index`: eight neighbouring indices share one Philox block.
HALFBYTE_HD inline uint32_t random16(const Philox& p, uint32_t index) {
  const uint32_t low = index & 2u ? p.word1 : p.word0, high = index & 2u ? p.word3 : p.word2;
  return ((index & 4u ? high : low) >> (16 * (index & 1u))) & 0xFFFFu;
}

// Up when fraction(x / spacing) + random / 65536 >= 1; NaN and Inf as with rounding to nearest.
HALFBYTE_HD inline uint32_t round_stochastic_bfloat16(float x, uint32_t random) {
  const uint32_t b = float_bits(x);
  if ((b & 0x7FFFFFFFu) > 0x7F800000u) return (b >> 16) | 0x40u;
  return ((b & 0x7F800000u) == 0x7F800000u ? b : b + random) >> 16;
}
HALFBYTE_HD inline uint32_t round_stochastic_float16(float x, uint32_t random) {
  const uint32_t b = float_bits(x), magnitude = b & 0x7FFFFFFFu, sign = (b >> 16) & 0x8000u;
  if (magnitude > 0x7F800000u) return sign | 0x7E00u;
  if (magnitude >= 0x47800000u) return sign | 0x7C00u;  // 65536 and above
  if (magnitude >= 0x38800000u) return sign | ((magnitude + (random >> 3) - 0x38000000u) >> 13);
  const float y = mul_ftz(bits_float(magnitude), 0x1p24f);  // subnormal: multiples of 2^-24
  const uint32_t below = uint32_t(y);
  const uint32_t fraction = uint32_t(mul_ftz(sub_rn(y, float(below)), 65536.0f));
  return sign | (below + (fraction + random >= 65536u ? 1u : 0u));
}

}  // namespace halfbyte::cuda
