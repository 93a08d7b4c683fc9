// What quantize_kernel.h needs of an ISA, in AVX-512.
#pragma once

#include "quantize_places.h"
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

inline __m256i join_bytes(__m512i low, __m512i high) {  // the low bytes of 32 dwords
  return _mm256_set_m128i(_mm512_cvtepi32_epi8(high), _mm512_cvtepi32_epi8(low));
}

// The words of 16 elements, in the lower halves of dwords. Beyond: the products may lie outside [-1, 1].
template <bool Beyond>
inline __m512i to_words(__m512 x, float reciprocal) {
  const __m512 origin = _mm512_set1_ps(kOrigin);
  if (!Beyond) return _mm512_castps_si512(_mm512_fmadd_ps(x, _mm512_set1_ps(reciprocal * kUnit), origin));
  const __m512 v = _mm512_mul_ps(x, _mm512_set1_ps(reciprocal)), one = _mm512_set1_ps(1.0f);
  const __m512 inside = _mm512_max_ps(_mm512_min_ps(v, one), _mm512_set1_ps(-1.0f));
  return _mm512_castps_si512(_mm512_fmadd_ps(inside, _mm512_set1_ps(kUnit), origin));
}
// The lower halves of encode(16 elements)'s dwords, of 32 elements in their order.
template <class T, class Encode>
inline __m512i join_words(const T* x, const Encode& encode) {
  if constexpr (__is_same(T, BFloat16)) {  // the even elements and the odd ones: what widens them in order takes more
    const __m512i words = load_vector(x);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(int32_t(0xFFFF0000u))));
    return _mm512_mask_blend_epi16(0xAAAAAAAAu, encode(even), _mm512_slli_epi32(encode(odd), 16));
  } else {
    const __m512i lower = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32,  //
                                           30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutex2var_epi16(encode(load_floats(x)), lower, encode(load_floats(x + 16)));
  }
}
template <bool Beyond, class T>
inline __m512i load_words(const T* x, float reciprocal) {
  return join_words(x, [&](__m512 v) { return to_words<Beyond>(v, reciprocal); });
}

// 32 elements -> 16 bytes of codes of x * reciprocal.
template <class T, bool FP4, bool Beyond>
inline void encode_4bit(const T* x, float reciprocal, uint8_t* codes) {
  const __m512i words = load_words<Beyond>(x, reciprocal);
  const __m512i addends = _mm512_load_si512(FP4 ? kFP4Places.addend : kNF4Places.addend);
  const __m512i sums = _mm512_add_epi16(words, _mm512_permutexvar_epi16(_mm512_srai_epi16(words, kPlaceBits), addends));
  __m512i found = _mm512_srli_epi16(sums, kCodeBits);
  if (FP4) {
    const __m128i of_rank = _mm_load_si128(reinterpret_cast<const __m128i*>(kFP4Codes.of_rank));
    found = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(of_rank), found);
  }
  const __m512i pairs = _mm512_madd_epi16(found, _mm512_set1_epi32(0x00010010));  // 16 * even element + odd element
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(pairs));
  const __mmask32 undecided = _mm512_testn_epi16_mask(sums, _mm512_set1_epi16((1 << kCodeBits) - 1));
  if (undecided) [[unlikely]]
    decide<T, FP4>(x, reciprocal, undecided, codes);
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

// int8 codes of 16 floats, in dwords. Beyond: they may be larger than kInt8Max by more than rounding.
template <bool Beyond>
inline __m512i encode_int8(__m512 v) {
  if (Beyond) v = _mm512_max_ps(_mm512_min_ps(v, _mm512_set1_ps(kInt8Max)), _mm512_set1_ps(-kInt8Max));
  return _mm512_cvtps_epi32(v);
}

// 32 elements -> 32 codes of x * factor.
template <class T, bool FP8, bool Beyond>
inline void encode_8bit(const T* x, float factor, uint8_t* codes) {
  const __m512 scale = _mm512_set1_ps(factor);
  __m256i bytes;
  if constexpr (FP8) {
    bytes = join_bytes(encode_fp8(_mm512_mul_ps(load_floats(x), scale)), encode_fp8(_mm512_mul_ps(load_floats(x + 16), scale)));
  } else {
    const auto encode = [&](__m512 v) { return encode_int8<Beyond>(_mm512_mul_ps(v, scale)); };
    bytes = _mm512_cvtepi16_epi8(join_words(x, encode));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
}

}  // namespace
}  // namespace halfbyte::cpu
