// What quantize_kernel.h needs of an ISA, in AVX2.
#pragma once

#include "kernels.h"
#include "simd/avx2.h"

namespace halfbyte::cpu {
namespace {

constexpr int64_t kEncodeGroup = 32;  // elements per call of encode_4bit and encode_8bit; magnitude_max takes multiples

// Largest magnitude_bits of `count` elements, as integers.
inline uint32_t magnitude_max(const float* x, int64_t count) {
  const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t i = 0; i < count; i += 16) {
    a = _mm256_max_epu32(a, _mm256_and_si256(load_vector(x + i), mask));
    b = _mm256_max_epu32(b, _mm256_and_si256(load_vector(x + i + 8), mask));
  }
  a = _mm256_max_epu32(a, b);
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
  return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1))));
}

// bf16 and fp16 alike.
template <class T>
inline uint32_t magnitude_max(const T* x, int64_t count) {
  const __m256i mask = _mm256_set1_epi16(0x7FFF);
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t i = 0; i < count; i += 32) {
    a = _mm256_max_epu16(a, _mm256_and_si256(load_vector(x + i), mask));
    b = _mm256_max_epu16(b, _mm256_and_si256(load_vector(x + i + 16), mask));
  }
  a = _mm256_max_epu16(a, b);
  const __m128i m = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  // The only horizontal instruction finds a minimum.
  return 0xFFFFu - uint32_t(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(m, _mm_set1_epi16(-1))), 0));
}

// Thresholds in the order the searches below ask for them: they count down from 0, and vpermps reads 3 bits of -count.
struct SearchTables {
  alignas(32) float nf4_third[8], nf4_fourth[8], fp4_third[8];
};
constexpr SearchTables make_search_tables() {
  SearchTables t{};
  for (int q = 0; q < 4; ++q) t.nf4_third[-q & 7] = kNF4Thresholds.value[4 * q + 1];
  for (int q = 0; q < 8; ++q) t.nf4_fourth[-q & 7] = kNF4Thresholds.value[2 * q];
  for (int q = 0; q < 4; ++q) t.fp4_third[-q & 7] = kFP4Thresholds.value[2 * q];
  return t;
}
inline constexpr SearchTables kSearchTables = make_search_tables();

inline __m256i exceeds(__m256 v, __m256 threshold) {  // -1 where v > threshold
  return _mm256_castps_si256(_mm256_cmp_ps(v, threshold, _CMP_GT_OQ));
}
inline __m256 choose(__m256i mask, float where_clear, float where_set) {
  return _mm256_blendv_ps(_mm256_set1_ps(where_clear), _mm256_set1_ps(where_set), _mm256_castsi256_ps(mask));
}
inline __m256i twice_plus(__m256i a, __m256i b) { return _mm256_add_epi32(_mm256_add_epi32(a, a), b); }

// Minus the number of nf4 thresholds below v, by bisection.
inline __m256i search_nf4(__m256 v) {
  const float* t = kNF4Thresholds.value;
  const __m256i first = exceeds(v, _mm256_set1_ps(t[7]));
  __m256i count = twice_plus(first, exceeds(v, choose(first, t[3], t[11])));
  count = twice_plus(count, exceeds(v, _mm256_permutevar8x32_ps(_mm256_load_ps(kSearchTables.nf4_third), count)));
  return twice_plus(count, exceeds(v, _mm256_permutevar8x32_ps(_mm256_load_ps(kSearchTables.nf4_fourth), count)));
}

// Minus (the number of fp4 thresholds below |v|, plus 8 where v has its sign bit set).
inline __m256i search_fp4(__m256 v) {
  const float* t = kFP4Thresholds.value;
  const __m256 sign_bit = _mm256_set1_ps(-0.0f), magnitude = _mm256_andnot_ps(sign_bit, v);
  const __m256i first = exceeds(magnitude, _mm256_set1_ps(t[3]));
  __m256i count = twice_plus(first, exceeds(magnitude, choose(first, t[1], t[5])));
  count = twice_plus(count, exceeds(magnitude, _mm256_permutevar8x32_ps(_mm256_load_ps(kSearchTables.fp4_third), count)));
  const __m256i eight = _mm256_srli_epi32(_mm256_castps_si256(_mm256_and_ps(sign_bit, v)), 28);
  return _mm256_sub_epi32(count, eight);
}

// 32 elements as floats, in the order that is cheapest to make and that the packs below undo.
template <class T>
inline void load_group(const T* x, __m256 (&v)[4]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) v[i] = load_floats(x + 8 * i);
}
template <class T>
constexpr bool kLoadsWide = false;
template <>
constexpr bool kLoadsWide<BFloat16> = true;
template <>
inline void load_group(const BFloat16* x, __m256 (&v)[4]) {  // 0-3, 8-11 | 4-7, 12-15 | and 16 further
  const __m256i zero = _mm256_setzero_si256();
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256i words = load_vector(x + 16 * i);
    v[2 * i] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, words));
    v[2 * i + 1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, words));
  }
}

// The dwords of 32 elements that load_group made -> bytes with saturation, in the order the packs leave: dwords of
// elements 0-3, 8-11, 16-19, 24-27 | 4-7, 12-15, 20-23, 28-31, or for bf16 0-7, 16-23 | 8-15, 24-31.
template <bool Signed>
inline __m256i pack_group(const __m256i (&v)[4]) {
  const __m256i low = _mm256_packs_epi32(v[0], v[1]), high = _mm256_packs_epi32(v[2], v[3]);
  return Signed ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
}

// 32 elements -> 16 bytes of codes of x * reciprocal. Beyond (products outside [-1, 1]) needs nothing special here.
template <class T, bool FP4, bool Beyond>
inline void encode_4bit(const T* x, float reciprocal, uint8_t* codes) {
  const __m256 scale = _mm256_set1_ps(reciprocal);
  __m256 v[4];
  __m256i found[4];
  load_group(x, v);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_mul_ps(v[i], scale);
    found[i] = FP4 ? search_fp4(v[i]) : search_nf4(v[i]);
  }
  __m256i bytes = _mm256_abs_epi8(pack_group<true>(found));
  if (FP4) {  // rank + 8 * sign -> code; -0 does not exist
    const __m256i code = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 6, 7, 4, 5, 2, 3, 0, 9, 14, 15, 12, 13, 10, 11));
    bytes = _mm256_shuffle_epi8(code, bytes);
  }
  const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x0110));  // 16 * even element + odd element
  const __m256i packed = _mm256_packus_epi16(pairs, pairs);
  const __m128i low = _mm256_castsi256_si128(packed), high = _mm256_extracti128_si256(packed, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes),
                   kLoadsWide<T> ? _mm_unpacklo_epi32(low, high) : _mm_unpacklo_epi16(low, high));
}

// e4m3 codes of 8 floats, in dwords. Adding a power of two whose last bit is worth the code's last bit rounds v to that
// bit: the sum's distance from the power is the mantissa, the power's own exponent the rest of the code.
inline __m256i encode_fp8(__m256 v) {
  const __m256 sign_bit = _mm256_set1_ps(-0.0f);
  const __m256 magnitude = _mm256_min_ps(_mm256_andnot_ps(sign_bit, v), _mm256_set1_ps(kFP8Max));
  const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(magnitude), _mm256_set1_epi32(0x7F800000));
  const __m256i least = _mm256_castps_si256(_mm256_set1_ps(0x1p14f));  // subnormal codes: steps of 2^-9
  const __m256i power = _mm256_max_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(20 << 23)), least);
  const __m256i sum = _mm256_castps_si256(_mm256_add_ps(magnitude, _mm256_castsi256_ps(power)));
  const __m256i code =
      _mm256_add_epi32(_mm256_sub_epi32(sum, power), _mm256_srli_epi32(_mm256_sub_epi32(power, least), 20));
  return _mm256_or_si256(code, _mm256_srli_epi32(_mm256_castps_si256(_mm256_and_ps(sign_bit, v)), 24));
}

inline __m256i encode_int8(__m256 v) {
  const __m256 limit = _mm256_set1_ps(kInt8Max);
  return _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(v, limit), _mm256_sub_ps(_mm256_setzero_ps(), limit)));
}

// 32 elements -> 32 codes of x * factor.
template <class T, bool FP8>
inline void encode_8bit(const T* x, float factor, uint8_t* codes) {
  const __m256 scale = _mm256_set1_ps(factor);
  __m256 v[4];
  __m256i code[4];
  load_group(x, v);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_mul_ps(v[i], scale);
    code[i] = FP8 ? encode_fp8(v[i]) : encode_int8(v[i]);
  }
  const __m256i bytes = pack_group<!FP8>(code);
  store_vector<false>(codes, kLoadsWide<T> ? _mm256_permute4x64_epi64(bytes, 0xD8)
                                           : _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}

}  // namespace
}  // namespace halfbyte::cpu
