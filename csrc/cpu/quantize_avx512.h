// What quantize_kernel.h needs of an ISA, in AVX-512.
#pragma once

#include "kernels.h"
#include "simd/avx512.h"

namespace halfbyte::cpu {
namespace {

constexpr int64_t kEncodeGroup = 32;  // elements per call of encode_4bit and encode_8bit; magnitude_max takes multiples

// Largest magnitude_bits of `count` elements, as integers.
inline uint32_t magnitude_max(const float* x, int64_t count) {
  const __m512i mask = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i a = _mm512_setzero_si512(), b = a;
  for (int64_t i = 0; i < count; i += 32) {
    a = _mm512_max_epu32(a, _mm512_and_si512(load_vector(x + i), mask));
    b = _mm512_max_epu32(b, _mm512_and_si512(load_vector(x + i + 16), mask));
  }
  return _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
}

// bf16 and fp16 alike.
template <class T>
inline uint32_t magnitude_max(const T* x, int64_t count) {
  const __m512i mask = _mm512_set1_epi16(0x7FFF);
  __m512i a = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 32) a = _mm512_max_epu16(a, _mm512_and_si512(load_vector(x + i), mask));
  const __m256i b = _mm256_max_epu16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  const __m128i c = _mm_max_epu16(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  // The only horizontal instruction finds a minimum.
  return 0xFFFFu - uint32_t(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(c, _mm_set1_epi16(-1))), 0));
}

// [-1, 1] cut into buckets of 1/15, few enough for one permute: no bucket holds two thresholds, so its number and one
// comparison give the code. Buckets are v * 15 rounded, 1 to 31 (nf4, 16 added) and 0 to 15 (fp4 magnitudes).
constexpr float kBucketsPerUnit = 15.0f;
struct BucketTables {
  alignas(64) float nf4_threshold[32];  // of each bucket; infinite if it holds none
  alignas(64) float fp4_threshold[16];
  alignas(64) int32_t nf4_rank[32];  // thresholds below each bucket
  alignas(64) int32_t fp4_rank[16];
  bool one_threshold_each;
};

// Fills threshold[b] and rank[b] for buckets 0..count of which `zero` is the one around 0.
constexpr bool fill_buckets(const float* thresholds, int n, int count, int zero, float* threshold, int32_t* rank) {
  bool one_each = true;
  for (int b = 0; b < count; ++b) {
    const double slack = 1e-5;  // far more than the product with 15 can be off
    const double low = (b - zero - 0.5) / kBucketsPerUnit - slack, high = (b - zero + 0.5) / kBucketsPerUnit + slack;
    int below = 0, inside = 0;
    threshold[b] = __builtin_inff();
    for (int i = 0; i < n; ++i) {
      below += thresholds[i] < low;
      if (thresholds[i] >= low && thresholds[i] <= high) {
        threshold[b] = thresholds[i];
        ++inside;
      }
    }
    one_each = one_each && inside <= 1;
    rank[b] = below;
  }
  return one_each;
}

constexpr BucketTables make_bucket_tables() {
  BucketTables t{};
  t.one_threshold_each = fill_buckets(kNF4Thresholds.value, 15, 32, 16, t.nf4_threshold, t.nf4_rank) &&
                         fill_buckets(kFP4Thresholds.value, 7, 16, 0, t.fp4_threshold, t.fp4_rank);
  return t;
}
inline constexpr BucketTables kBucketTables = make_bucket_tables();
static_assert(kBucketTables.one_threshold_each);

// Bucket of 16 elements, in dwords; the bits above are waste.
inline __m512i buckets(__m512 v, float shift) {
  // 1.5 * 2^23 has its last bit worth 1: the sum's low bits are v * 15 + shift, rounded.
  const __m512 sum = _mm512_fmadd_ps(v, _mm512_set1_ps(kBucketsPerUnit), _mm512_set1_ps(12582912.0f + shift));
  return _mm512_castps_si512(sum);
}

inline __m256i join_bytes(__m512i low, __m512i high) {  // the low bytes of 32 dwords
  return _mm256_set_m128i(_mm512_cvtepi32_epi8(high), _mm512_cvtepi32_epi8(low));
}

// 32 elements -> 16 bytes of codes of x * reciprocal. Beyond: the products may lie outside [-1, 1].
template <class T, bool FP4, bool Beyond>
inline void encode_4bit(const T* x, float reciprocal, uint8_t* codes) {
  constexpr auto& t = kBucketTables;
  const __m512 scale = _mm512_set1_ps(reciprocal), one = _mm512_set1_ps(1.0f);
  __m512i rank[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    __m512 v = _mm512_mul_ps(load_floats(x + 16 * i), scale);
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(v));
    if (FP4) v = _mm512_abs_ps(v);
    if (Beyond) v = _mm512_max_ps(_mm512_min_ps(v, one), _mm512_set1_ps(-1.0f));
    const __m512i bucket = buckets(v, FP4 ? 0.0f : 16.0f);
    __m512 threshold;
    if constexpr (FP4) {
      threshold = _mm512_permutexvar_ps(bucket, _mm512_load_ps(t.fp4_threshold));
      rank[i] = _mm512_permutexvar_epi32(bucket, _mm512_load_si512(t.fp4_rank));
    } else {
      threshold = _mm512_permutex2var_ps(_mm512_load_ps(t.nf4_threshold), bucket, _mm512_load_ps(t.nf4_threshold + 16));
      rank[i] = _mm512_permutex2var_epi32(_mm512_load_si512(t.nf4_rank), bucket, _mm512_load_si512(t.nf4_rank + 16));
    }
    const __mmask16 above = _mm512_cmp_ps_mask(v, threshold, _CMP_GT_OQ);
    rank[i] = _mm512_mask_add_epi32(rank[i], above, rank[i], _mm512_set1_epi32(1));
    if (FP4) rank[i] = _mm512_mask_add_epi32(rank[i], negative, rank[i], _mm512_set1_epi32(8));
  }
  __m256i bytes = join_bytes(rank[0], rank[1]);
  if constexpr (FP4) {
    static constexpr auto kCodes = [] {
      struct {
        alignas(16) uint8_t of_rank[16];  // + 8: of negative ones
      } table{};
      for (int i = 0; i < 8; ++i) {
        table.of_rank[i] = kFP4Ascending[i];
        table.of_rank[i + 8] = uint8_t(kFP4Ascending[i] ? kFP4Ascending[i] | 8 : 0);
      }
      return table;
    }();
    bytes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kCodes.of_rank))), bytes);
  }
  const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x0110));  // 16 * even element + odd element
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm256_cvtepi16_epi8(pairs));
}

// e4m3 codes of 16 floats, in dwords. Adding a power of two whose last bit is worth the code's last bit rounds v to that
// bit: the sum's distance from the power is the mantissa, the power's own exponent the rest of the code.
inline __m512i encode_fp8(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512 magnitude = _mm512_min_ps(_mm512_abs_ps(v), _mm512_set1_ps(kFP8Max));
  const __m512i exponent = _mm512_and_si512(_mm512_castps_si512(magnitude), _mm512_set1_epi32(0x7F800000));
  const __m512i least = _mm512_castps_si512(_mm512_set1_ps(0x1p14f));  // subnormal codes: steps of 2^-9
  const __m512i power = _mm512_max_epi32(_mm512_add_epi32(exponent, _mm512_set1_epi32(20 << 23)), least);
  const __m512i sum = _mm512_castps_si512(_mm512_add_ps(magnitude, _mm512_castsi512_ps(power)));
  const __m512i code =
      _mm512_add_epi32(_mm512_sub_epi32(sum, power), _mm512_srli_epi32(_mm512_sub_epi32(power, least), 20));
  return _mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80)));
}

inline __m512i encode_int8(__m512 v) {
  return _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(v, _mm512_set1_ps(kInt8Max)), _mm512_set1_ps(-kInt8Max)));
}

// 32 elements -> 32 codes of x * factor.
template <class T, bool FP8>
inline void encode_8bit(const T* x, float factor, uint8_t* codes) {
  const __m512 scale = _mm512_set1_ps(factor);
  const __m512 a = _mm512_mul_ps(load_floats(x), scale), b = _mm512_mul_ps(load_floats(x + 16), scale);
  const __m256i bytes = FP8 ? join_bytes(encode_fp8(a), encode_fp8(b)) : join_bytes(encode_int8(a), encode_int8(b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
}

}  // namespace
}  // namespace halfbyte::cpu
