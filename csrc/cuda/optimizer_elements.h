// Arithmetic of the 8-bit optimizers for one element, host and device: the dynamic map, the update rules, stochastic
// rounding. The rules are those of halfbyte/reference_optimizer.py: fp32, one rounding per operation, subnormal numbers
// are zero. On the device that is the .ftz form of each instruction, spelled in PTX so that no compiler flag decides it.
#pragma once

#include "../optimizer.h"
#include "../philox.h"
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
// Square root and quotient without the branches that division and root have for extreme numbers: correctly rounded, by the same
// steps as those take, for numbers `in_range` below.
__device__ inline float sqrt_in_range(float a) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(a));
  y = fminf(y, 0x1p126f);  // so that the root of 0 is 0
  const float root = mul_ftz(a, y);
  return fma_ftz(fma_ftz(-root, root, a), mul_ftz(y, 0.5f), root);
}
__device__ inline float div_in_range(float a, float b) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  r = fma_ftz(r, fma_ftz(-b, r, 1.0f), r);
  const float quotient = mul_ftz(a, r);
  return fma_ftz(r, fma_ftz(-b, quotient, a), quotient);
}
#else
inline float flush(float v) { return (float_bits(v) & 0x7F800000u) == 0 ? bits_float(float_bits(v) & 0x80000000u) : v; }
HALFBYTE_HD inline float mul_ftz(float a, float b) { return flush(flush(a) * flush(b)); }
HALFBYTE_HD inline float fma_ftz(float a, float b, float c) { return flush(__builtin_fmaf(flush(a), flush(b), flush(c))); }
HALFBYTE_HD inline float div_ftz(float a, float b) { return flush(flush(a) / flush(b)); }
HALFBYTE_HD inline float sqrt_ftz(float a) { return __builtin_sqrtf(flush(a)); }
HALFBYTE_HD inline float sqrt_in_range(float a) { return sqrt_ftz(a); }
HALFBYTE_HD inline float div_in_range(float a, float b) { return div_ftz(a, b); }
#endif

// ---- the dynamic map (dynamic_map.h) ----

HALFBYTE_HD inline float decode_signed(const DynamicMap& map, uint32_t code) {
  const float m = float(4 * (int32_t(code) - 127));  // 4 m, with the sign
  const uint32_t e = (float_bits(m) >> 23) & 7u, sign = float_bits(m) & 0x80000000u;
  return fma_ftz(m, map.B[e], bits_float(float_bits(map.A[e]) ^ sign));
}

HALFBYTE_HD inline float decode_unsigned(const DynamicMap& map, uint32_t code) {
  const float m = float(4 * (code + 1));
  const uint32_t e = (float_bits(m) >> 23) & 7u;
  return fma_ftz(m, map.B[e], map.A[e]);
}

// The encoder's classes by the exponent of a magnitude, which is at most about 1: a power of two to the next holds one boundary
// of classes at most, and what lies above it has the class that the next exponent starts with. Neighbouring exponents lie in
// neighbouring banks.
constexpr int kExponents = 128;
struct alignas(8) ClassStep {
  float J, P;  // dynamic_map.h
};
struct alignas(2048) ClassTables {
  ClassStep step[kExponents];                           // of the class that the exponent starts with
  struct alignas(8) { float value; } above[kExponents]; // a > above: that of the next exponent
};
HALFBYTE_HD inline void fill_classes(ClassTables& tables, const DynamicMap& map, uint32_t exponent) {
  uint32_t c = 0;
  while (c < 7 && bits_float(exponent << 23) > map.above[c]) ++c;
  const bool ends = c < 7 && (float_bits(map.above[c]) >> 23) == exponent;
  tables.above[exponent].value = ends ? map.above[c] : 3e38f;
  tables.step[exponent] = {map.J[c], map.P[c]};
  // A positive second moment never becomes code 0. The step of m = 2 holds 2^-23: what is smaller gets its code as well.
  if (map.first_exponent != 0 && exponent < 127 - 23) tables.step[exponent] = {0.0f, float(9.0 / 8.0) * (exponent == 0 ? 0.75f : 1.25f)};
}

// Where the tables are. In shared memory one address serves both: its base, aligned to their size, or the exponent times 8.
class ClassLookup {
 public:
#if defined(__CUDA_ARCH__)
  __device__ explicit ClassLookup(const ClassTables& tables) : base_(uint32_t(__cvta_generic_to_shared(&tables))) {
    asm volatile("" : "+r"(base_));  // made once, and after the barrier behind which the tables are complete
  }
  __device__ ClassStep step_of(float a) const {
    const uint32_t at = ((float_bits(a) >> 20) & (8 * kExponents - 8)) | base_;
    float above;
    ClassStep step;
    asm("ld.shared.f32 %0, [%1 + 1024];" : "=f"(above) : "r"(at));
    asm("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(step.J), "=f"(step.P) : "r"(a > above ? at + 8 : at));
    return step;
  }

 private:
  uint32_t base_;
#else
  explicit ClassLookup(const ClassTables& tables) : tables_(&tables) {}
  ClassStep step_of(float a) const {
    const uint32_t exponent = (float_bits(a) >> 23) & (kExponents - 1);
    return tables_->step[exponent + (a > tables_->above[exponent].value ? 1 : 0)];
  }

 private:
  const ClassTables* tables_;
#endif
};
static_assert(sizeof(ClassTables) == 2048 && sizeof(ClassStep) == 8);

// Bytes of two words, by the nibbles of `selector`: 0..3 of a, 4..7 of b; with 8 added, the byte's sign in all 8 bits.
HALFBYTE_HD inline uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
#else
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = (selector >> (4 * i)) & 15u, byte = ((nibble & 4u ? b : a) >> (8 * (nibble & 3u))) & 0xFFu;
    r |= (nibble & 8u ? (byte >> 7 ? 0xFFu : 0u) : byte) << (8 * i);
  }
  return r;
#endif
}

// The smaller ones of the upper and of the lower 16 bits. One instruction for two words from sm_90 on.
HALFBYTE_HD inline uint32_t minimum_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vminu2(a, b);
#else
  const uint32_t low = (a & 0xFFFFu) < (b & 0xFFFFu) ? a : b, high = a >> 16 < b >> 16 ? a : b;
  return (high & 0xFFFF0000u) | (low & 0xFFFFu);
#endif
}

// The word of 0 <= a <= 1.0000001: bits 16 to 23 are the magnitude m (signed) or the code (unsigned); the lower half is below
// kTieLimit where a lies within a few ulps of a midpoint, and the caller must settle it.
template <bool SIGNED>
constexpr uint32_t kTieLimit = SIGNED ? 2 * kTieUlps : 4 * kTieUlps;
template <bool SIGNED>
HALFBYTE_HD inline uint32_t code_word(const ClassLookup& classes, float a) {
  const ClassStep step = classes.step_of(a);
  const float w = fminf(fma_ftz(a, step.J, float(8.0 / 9.0)), kInsideLastStep);
  const uint32_t word = float_bits(fma_ftz(w, step.P, (SIGNED ? 128.0f : 127.5f) + float(kTieUlps) / 65536.0f));
  return SIGNED ? word : word + word;
}

// The word with m decided by the exact midpoints.
template <bool SIGNED>
HALFBYTE_HD inline uint32_t settle(const float* midpoint, float a, uint32_t word, bool negative) {
  const uint32_t low = SIGNED ? 0 : 2, high = SIGNED ? (negative ? 127 : 128) : 256;
  uint32_t m = ((word >> 16) & 0xFFu) + (SIGNED ? 0u : 1u);
  while (m < high && a > midpoint[m]) ++m;
  while (m > low && !(a > midpoint[m - 1])) --m;
  return (SIGNED ? m : m - 1) << 16;
}

// What a block is encoded with: x * factor are its normalized values; all zero for an all-zero block.
struct BlockEncoder {
  float scale, factor;
};
// Blocks with a larger scale are encoded from their quarters: the reciprocal would be subnormal, that is 0.
constexpr uint32_t kLargestScale = (127 + 126) << 23;
HALFBYTE_HD inline BlockEncoder block_encoder(uint32_t absmax_bits) {
  if (absmax_bits == 0) return {0.0f, 0.0f};
  const float scale = bits_float(absmax_bits);
  return {scale, div_ftz(1.0f, absmax_bits > kLargestScale ? mul_ftz(scale, 0.25f) : scale)};
}

// Byte 2 of each of 4 words.
HALFBYTE_HD inline uint32_t codes_of(const uint32_t* words) {
  return pick_bytes(pick_bytes(words[0], words[1], 0x0062), pick_bytes(words[2], words[3], 0x0062), 0x5410);
}

// The codes of values of one block, 4 a word; second moments are not negative, and values of scales above kLargestScale are
// quarters. Ties and quotients that underflow are rare: branches for all values.
template <bool SIGNED, int COUNT>
HALFBYTE_HD inline void encode_moments(const ClassLookup& classes, const float* midpoint, const BlockEncoder& block,
                                       const float (&x)[COUNT], uint32_t (&codes)[COUNT / 4]) {
  uint32_t words[COUNT];
  uint32_t nearest = 0xFFFFFFFFu;
  const auto normalized = [&](float v) { return mul_ftz(fabsf(v), block.factor); };
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < COUNT; ++i) {
    words[i] = code_word<SIGNED>(classes, normalized(x[i]));
    nearest = minimum_halves(nearest, words[i]);  // upper halves are never small
  }
  if ((nearest & 0xFFFFu) < kTieLimit<SIGNED>) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < COUNT; ++i) {
      if ((words[i] & 0xFFFFu) < kTieLimit<SIGNED>)
        words[i] = settle<SIGNED>(midpoint, normalized(x[i]), words[i], float_bits(x[i]) >> 31);
    }
  }
  if (!SIGNED && block.scale >= 1.0f) {  // a positive value is positive even where its quotient is 0
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < COUNT; ++i) {
      if (x[i] >= 0x1p-126f && (words[i] & 0xFF0000u) == 0) words[i] = 1u << 16;
    }
  }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < COUNT; i += 4) {
    const uint32_t code = codes_of(words + i);
    if constexpr (SIGNED) {
      // 127 - m of negative ones, 127 + m of others; no byte carries: -1.0 is code 0, not -1.
      const uint32_t sign = pick_bytes(pick_bytes(float_bits(x[i]), float_bits(x[i + 1]), 0x00FB),
                                       pick_bytes(float_bits(x[i + 2]), float_bits(x[i + 3]), 0x00FB), 0x5410);
      const uint32_t down = code & sign;
      codes[i / 4] = 0x7F7F7F7Fu + (code & ~sign) - down + ((down >> 7) & 0x01010101u);
    } else {
      codes[i / 4] = code;
    }
  }
}

// ---- the rules ----

// OptimizerScalars as a block's elements need them: its stored scales times the weights of the stored moments.
struct BlockScalars {
  float grad_factor, first_take, second_take, weight_decay, momentum, step_size, decay, second_factor, eps;
  float first_keep, second_keep;
  bool nesterov;
};
HALFBYTE_HD inline BlockScalars block_scalars(const OptimizerScalars& s, float first_scale, float second_scale) {
  return {s.grad_factor, s.first_take,    s.second_take, s.weight_decay, s.momentum, s.step_size,
          s.decay,       s.second_factor, s.eps,         mul_ftz(first_scale, s.first_keep),
          mul_ftz(second_scale, s.second_keep), s.nesterov};
}

struct Updated {
  float param, first, second;
};

// One element. first and second are map values. The parameter of rules with two moments is left as it is: see step_by_moments.
template <OptimizerRule RULE>
HALFBYTE_HD inline Updated update_element(const BlockScalars& s, float param, float grad, float first, float second) {
  float g = mul_ftz(grad, s.grad_factor);
  if constexpr (RULE == OptimizerRule::kAdam || RULE == OptimizerRule::kSGD) {
    if (s.weight_decay != 0.0f) g = fma_ftz(s.weight_decay, param, g);
  }
  Updated out{param, fma_ftz(first, s.first_keep, mul_ftz(g, s.first_take)), 0.0f};
  if constexpr (RULE == OptimizerRule::kAdamW || RULE == OptimizerRule::kAdam) {
    out.second = fma_ftz(second, s.second_keep, mul_ftz(mul_ftz(g, g), s.second_take));
  } else if constexpr (RULE == OptimizerRule::kLion) {
    const float mixed = fma_ftz(first, s.second_keep, mul_ftz(g, s.second_take));
    const float one = bits_float(0x3F800000u | (float_bits(mixed) & 0x80000000u));
    // 0 * mixed makes the update NaN where the gradient is not finite: a sign alone would hide it.
    const float sign = fma_ftz(mixed, 0.0f, mixed != 0.0f ? one : 0.0f);
    out.param = fma_ftz(-s.step_size, sign, mul_ftz(param, s.decay));
  } else {
    out.param = fma_ftz(-s.step_size, s.nesterov ? fma_ftz(s.momentum, out.first, g) : out.first, param);
  }
  return out;
}

// The parameters of Adam and AdamW after a step: param - step_size * first / (sqrt(second) * second_factor + eps).
// Where all numbers are in range, roots and quotients need no branches. The range: second moments are 0 or normal and below
// 2^100 (scaled by 2^26, so that no remainder of the root is subnormal; the factor takes it back), first ones 0 or from 2^-80 to
// 2^100, and eps at least 2^-40. `first_max` and `second_max` are the bits of the largest |moment|, or of a negative second one.
template <OptimizerRule RULE, int COUNT>
HALFBYTE_HD inline void step_by_moments(const BlockScalars& s, const float (&first)[COUNT], const float (&second)[COUNT],
                                        uint32_t first_max, uint32_t second_max, float (&param)[COUNT]) {
  constexpr uint32_t kMost = (127 + 100) << 23, kLeastTwice = (127 - 80) << 24;
  bool in_range = first_max < kMost && second_max < kMost && s.eps >= 0x1p-40f;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < COUNT; ++i) in_range = in_range && 2 * float_bits(first[i]) - 1 >= kLeastTwice - 1;  // of 0 it is 2^32 - 1
  const float factor = mul_ftz(s.second_factor, 0x1p-13f);
  const auto step = [&](float before, float ratio) {
    return fma_ftz(-s.step_size, ratio, RULE == OptimizerRule::kAdamW ? mul_ftz(before, s.decay) : before);
  };
  if (in_range) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < COUNT; ++i) {
      const float below = fma_ftz(sqrt_in_range(mul_ftz(second[i], 0x1p26f)), factor, s.eps);
      param[i] = step(param[i], div_in_range(first[i], below));
    }
  } else {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < COUNT; ++i) {
      const float below = fma_ftz(sqrt_ftz(second[i]), s.second_factor, s.eps);
      param[i] = step(param[i], div_ftz(first[i], below));
    }
  }
}

// Moments that are not both finite start over, and leave their block's scales alone.
HALFBYTE_HD inline void restart_unless_finite(float& first, float& second) {
  if (!is_finite(first) || !is_finite(second)) first = second = 0.0f;
}

// ---- stochastic rounding: by (seed, step, global element index) alone ----

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
