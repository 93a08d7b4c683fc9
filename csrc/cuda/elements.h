// Arithmetic of single elements: conversions, encoders, decoders. Host and device, no torch: tests/cuda runs every function
// here on the CPU. Each rounding is spelled as its own IEEE operation, so that no compiler flag can fuse or flush one.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../formats.h"

#if defined(__USE_FAST_MATH__) || defined(__FAST_MATH__)
#error "the formats are defined by IEEE arithmetic: build without fast math"
#endif

namespace halfbyte::cuda {

using BFloat16 = __nv_bfloat16;
using Float16 = __half;

// One IEEE operation, one rounding. On the host this needs -ffp-contract=off.
#if defined(__CUDA_ARCH__)
HALFBYTE_HD inline float mul_rn(float a, float b) { return __fmul_rn(a, b); }
HALFBYTE_HD inline float add_rn(float a, float b) { return __fadd_rn(a, b); }
HALFBYTE_HD inline float sub_rn(float a, float b) { return __fsub_rn(a, b); }
HALFBYTE_HD inline float div_rn(float a, float b) { return __fdiv_rn(a, b); }
HALFBYTE_HD inline float rcp_rn(float a) { return __frcp_rn(a); }
HALFBYTE_HD inline float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
HALFBYTE_HD inline uint32_t float_bits(float v) { return __float_as_uint(v); }
HALFBYTE_HD inline float bits_float(uint32_t v) { return __uint_as_float(v); }
#else
HALFBYTE_HD inline float mul_rn(float a, float b) { return a * b; }
HALFBYTE_HD inline float add_rn(float a, float b) { return a + b; }
HALFBYTE_HD inline float sub_rn(float a, float b) { return a - b; }
HALFBYTE_HD inline float div_rn(float a, float b) { return a / b; }
HALFBYTE_HD inline float rcp_rn(float a) { return 1.0f / a; }
HALFBYTE_HD inline float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
HALFBYTE_HD inline uint32_t float_bits(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return bits;
}
HALFBYTE_HD inline float bits_float(uint32_t bits) {
  float v;
  memcpy(&v, &bits, 4);
  return v;
}
#endif

HALFBYTE_HD inline bool is_finite(float v) { return (float_bits(v) & 0x7F800000u) != 0x7F800000u; }

HALFBYTE_HD inline float to_float(float v) { return v; }
HALFBYTE_HD inline float to_float(BFloat16 v) { return __bfloat162float(v); }
HALFBYTE_HD inline float to_float(Float16 v) { return __half2float(v); }

template <class T>
HALFBYTE_HD inline T from_float(float v) {
  if constexpr (sizeof(T) == 4) {
    return v;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return __float2bfloat16_rn(v);
  } else {
    return __float2half_rn(v);
  }
}

// e4m3fn: exponent and mantissa placed in a float are the value times 2^-120, subnormals included; the product is exact.
HALFBYTE_HD inline float fp8_to_float(uint32_t code) {
  const uint32_t magnitude = (code & 0x7Fu) << 20;
  const float value = mul_rn(bits_float((code & 0x80u) << 24 | magnitude), 0x1p120f);
  return magnitude == 0x07F00000u ? bits_float(kNaNBits) : value;
}

// e4m3fn, saturating, nearest even. NaN never gets here: rows that hold one are written without encoding.
HALFBYTE_HD inline uint32_t float_to_fp8(float v) {
  const uint32_t sign = (float_bits(v) >> 24) & 0x80u;
  const uint32_t magnitude = float_bits(v) & 0x7FFFFFFFu;
  if (magnitude >= 0x43E00000u) return sign | 0x7Eu;  // 448 and above
  if (magnitude >= 0x3C800000u) {                     // normal: 2^-6 and above
    const uint32_t code = (magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u) - 0x3C000000u) >> 20;
    return sign | (code > 0x7Eu ? 0x7Eu : code);
  }
  // Subnormal: the sum's last bit is worth 2^-9, the smallest e4m3fn step.
  return sign | (float_bits(sub_rn(bits_float(magnitude), -0x1p14f)) - 0x46800000u);
}

// float_to_fp8 of two finite floats, the first in the lower byte: one instruction where there are fp8 tensor cores.
HALFBYTE_HD inline uint32_t floats_to_fp8(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  return both;
#else
  return float_to_fp8(first) | float_to_fp8(second) << 8;
#endif
}

// sum plus the four products of the signed bytes of a and b.
HALFBYTE_HD inline int32_t dot4(uint32_t a, uint32_t b, int32_t sum) {
#if defined(__CUDA_ARCH__)
  return __dp4a(int32_t(a), int32_t(b), sum);
#else
  for (int i = 0; i < 32; i += 8) sum += int32_t(int8_t(a >> i)) * int8_t(b >> i);
  return sum;
#endif
}

// round to nearest even and clamp to [-127, 127]: the last byte of the sum's mantissa is the rounded integer. Conversions run at
// an eighth of the rate of additions.
HALFBYTE_HD inline uint32_t float_to_int8(float v) {
  const float clamped = v > kInt8Max ? kInt8Max : v < -kInt8Max ? -kInt8Max : v;
  return float_bits(add_rn(clamped, 12582912.0f)) & 0xFFu;
}

// ---- 4-bit encoders: one bucket, one comparison ----
// bucket(v) = 16 + rn(15 * clamp(v)) never decreases with v and no two thresholds share a bucket, so the code is
// (thresholds in lower buckets) + (v > the threshold of v's own bucket): exactly "thresholds strictly below v".
struct Bucket {
  float threshold;  // +Inf where the bucket has none
  uint32_t below;   // code for v <= threshold
  uint32_t above;   // code for v > threshold
  uint32_t unused;
};
struct EncodeTable {
  Bucket bucket[32];
};

HALFBYTE_HD inline uint32_t bucket_of(float v) {
  const float clamped = v > 1.0f ? 1.0f : v < -1.0f ? -1.0f : v;
  // 1.5 * 2^23 + 16: the sum's last mantissa bits are the rounded integer.
  return float_bits(fma_rn(clamped, 15.0f, 12582928.0f)) & 31u;
}

// nf4: v against 15 thresholds. fp4: |v| against 7, the sign is added by encode_4bit.
inline EncodeTable make_encode_table(int32_t format) {
  EncodeTable table{};
  const bool fp4 = is_fp4(format);
  const int thresholds = fp4 ? 7 : 15;
  const float* threshold = fp4 ? kFP4Thresholds.value : kNF4Thresholds.value;
  const auto code = [&](int rank) { return uint32_t(fp4 ? kFP4Ascending[rank] : rank); };
  for (uint32_t b = 0; b < 32; ++b) {
    int rank = 0;
    while (rank < thresholds && bucket_of(threshold[rank]) < b) ++rank;
    const bool holds = rank < thresholds && bucket_of(threshold[rank]) == b;
    table.bucket[b] = {holds ? threshold[rank] : bits_float(0x7F800000u), code(rank), code(holds ? rank + 1 : rank), 0};
  }
  return table;
}

template <bool FP4>
HALFBYTE_HD inline uint32_t encode_4bit(const Bucket* table, float v) {
  const float position = FP4 ? bits_float(float_bits(v) & 0x7FFFFFFFu) : v;
  const Bucket& bucket = table[bucket_of(position)];
  const uint32_t code = position > bucket.threshold ? bucket.above : bucket.below;
  return FP4 && v < 0.0f && code != 0 ? code | 8u : code;
}

// The buckets as the lanes of a warp hold them: lane b knows bucket b's threshold and how many thresholds lie in lower buckets.
// A shuffle takes its index modulo 32, so the sum that bucket_of() masks is one as it stands.
struct LaneBuckets {
  float threshold[32];
  uint32_t rank[32];
};
inline LaneBuckets make_lane_buckets(int32_t format) {
  LaneBuckets lanes{};
  const int thresholds = is_fp4(format) ? 7 : 15;
  const float* threshold = is_fp4(format) ? kFP4Thresholds.value : kNF4Thresholds.value;
  for (uint32_t b = 0; b < 32; ++b) {
    int rank = 0;
    while (rank < thresholds && bucket_of(threshold[rank]) < b) ++rank;
    const bool holds = rank < thresholds && bucket_of(threshold[rank]) == b;
    lanes.threshold[b] = holds ? threshold[rank] : bits_float(0x7F800000u);
    lanes.rank[b] = uint32_t(rank);
  }
  return lanes;
}
// fp4 codes by rank of the magnitude (kFP4Ascending), a nibble each.
inline constexpr uint32_t kFP4CodesByRank = [] {
  uint32_t codes = 0;
  for (int rank = 0; rank < 8; ++rank) codes |= uint32_t(kFP4Ascending[rank]) << (4 * rank);
  return codes;
}();

// v = x * (1 / scale), or x / scale where the reciprocal overflows (subnormal scales).
struct Normalizer {
  float reciprocal, scale;
  bool divide;
  HALFBYTE_HD explicit Normalizer(float s) : reciprocal(rcp_rn(s)), scale(s), divide(!is_finite(rcp_rn(s))) {}
  HALFBYTE_HD float product(float x) const { return mul_rn(x, reciprocal); }
  HALFBYTE_HD float operator()(float x) const { return divide ? div_rn(x, scale) : product(x); }
};

// int8 and fp8: x * ((1 / scale) * limit), or (x / scale) * limit where that factor is not finite.
struct RowNormalizer {
  float factor, scale, limit;
  bool divide;
  HALFBYTE_HD RowNormalizer(float s, float l)
      : factor(mul_rn(rcp_rn(s), l)), scale(s), limit(l), divide(!is_finite(factor)) {}
  HALFBYTE_HD float product(float x) const { return mul_rn(x, factor); }
  HALFBYTE_HD float operator()(float x) const { return divide ? mul_rn(div_rn(x, scale), limit) : product(x); }
};

// The scale a block is stored with, from the largest |bits| of the block and the given scale if there is one.
// Non-finite values sort above every finite one as integers, so one maximum finds them too.
HALFBYTE_HD inline float block_scale(uint32_t largest_bits, const float* given) {
  if (largest_bits >= 0x7F800000u) return bits_float(kNaNBits);
  if (!given) return bits_float(largest_bits);
  const float s = *given;
  if (!(s >= 0.0f) || !is_finite(s)) return bits_float(kNaNBits);
  return s == 0.0f ? 0.0f : s;  // -0.0 is stored as 0.0
}

}  // namespace halfbyte::cuda
