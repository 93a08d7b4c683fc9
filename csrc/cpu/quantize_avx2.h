// What quantize_kernel.h needs of an ISA, in AVX2.
#pragma once

#include "quantize_places.h"
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

// The words of 8 elements, in the lower halves of dwords. Beyond: the products may lie outside [-1, 1].
template <bool Beyond>
inline __m256i to_words(__m256 x, float reciprocal) {
  const __m256 origin = _mm256_set1_ps(kOrigin);
  if (!Beyond) return _mm256_castps_si256(_mm256_fmadd_ps(x, _mm256_set1_ps(reciprocal * kUnit), origin));
  const __m256 v = _mm256_mul_ps(x, _mm256_set1_ps(reciprocal)), one = _mm256_set1_ps(1.0f);
  const __m256 inside = _mm256_max_ps(_mm256_min_ps(v, one), _mm256_set1_ps(-1.0f));
  return _mm256_castps_si256(_mm256_fmadd_ps(inside, _mm256_set1_ps(kUnit), origin));
}

// 16 elements as floats, the even ones and the odd ones. Their pairs: 0 to 7 for bf16, else 0 1 4 5 | 2 3 6 7.
struct EvenAndOdd {
  __m256 even, odd;
};
template <class T>
inline EvenAndOdd split_pairs(const T* x) {
  const __m256 a = load_floats(x), b = load_floats(x + 8);
  return {_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD)};
}
inline EvenAndOdd split_pairs(const BFloat16* x) {
  const __m256i words = load_vector(x);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int32_t(0xFFFF0000u))))};
}

inline __m256i join_words(__m256i even, __m256i odd) {  // the lower words of both
  return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA);
}

// A PlaceTable's numbers in bytes, for places from 0 up and for those below 0.
struct PlaceBytes {
  alignas(16) uint8_t low[2][16], high[2][16];
};
constexpr PlaceBytes make_place_bytes(const PlaceTable& table) {
  PlaceBytes t{};
  for (int i = 0; i < kPlaces; ++i) {
    t.low[i / 16][i % 16] = uint8_t(table.addend[i] & 0xFF);
    t.high[i / 16][i % 16] = uint8_t(table.addend[i] >> 8);
  }
  return t;
}
inline constexpr PlaceBytes kNF4PlaceBytes = make_place_bytes(kNF4Places), kFP4PlaceBytes = make_place_bytes(kFP4Places);

inline __m256i load_twice(const uint8_t* table) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

// 32 elements -> 16 bytes of codes of x * reciprocal.
template <class T, bool FP4, bool Beyond>
inline void encode_4bit(const T* x, float reciprocal, uint8_t* codes) {
  constexpr auto& t = FP4 ? kFP4PlaceBytes : kNF4PlaceBytes;
  const EvenAndOdd a = split_pairs(x), b = split_pairs(x + 16);
  const __m256i even = join_words(to_words<Beyond>(a.even, reciprocal), to_words<Beyond>(b.even, reciprocal));
  const __m256i odd = join_words(to_words<Beyond>(a.odd, reciprocal), to_words<Beyond>(b.odd, reciprocal));
  // A byte shuffle gives 0 where the uppermost bit of a place is set: each half of a table answers for its own places.
  const __m256i up = _mm256_packs_epi16(_mm256_srai_epi16(even, kPlaceBits), _mm256_srai_epi16(odd, kPlaceBits));
  const __m256i down = _mm256_xor_si256(up, _mm256_set1_epi8(int8_t(0xF0)));
  const __m256i low =
      _mm256_or_si256(_mm256_shuffle_epi8(load_twice(t.low[0]), up), _mm256_shuffle_epi8(load_twice(t.low[1]), down));
  const __m256i high =
      _mm256_or_si256(_mm256_shuffle_epi8(load_twice(t.high[0]), up), _mm256_shuffle_epi8(load_twice(t.high[1]), down));
  const __m256i even_sums = _mm256_add_epi16(even, _mm256_unpacklo_epi8(low, high));
  const __m256i odd_sums = _mm256_add_epi16(odd, _mm256_unpackhi_epi8(low, high));
  __m256i pairs;  // 16 * even element + odd element: nf4 in the upper bytes of words, fp4 in the lower ones
  if (FP4) {
    const __m256i of_rank = load_twice(kFP4Codes.of_rank);
    pairs = _mm256_or_si256(_mm256_slli_epi16(_mm256_shuffle_epi8(of_rank, _mm256_srli_epi16(even_sums, kCodeBits)), 4),
                            _mm256_shuffle_epi8(of_rank, _mm256_srli_epi16(odd_sums, kCodeBits)));
  } else {
    const __m256i upper_four = _mm256_set1_epi16(int16_t(0xF000));
    pairs = _mm256_or_si256(_mm256_and_si256(even_sums, upper_four),
                            _mm256_srli_epi16(_mm256_and_si256(odd_sums, upper_four), 4));
  }
  // Words are the pairs of x and of x + 16 by turns.
  const __m256i ordered = _mm256_shuffle_epi8(
      pairs, FP4 ? _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, -1, -1, -1, -1, -1, -1, -1, -1))
                 : _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 5, 9, 13, 3, 7, 11, 15, -1, -1, -1, -1, -1, -1, -1, -1)));
  const __m128i first = _mm256_castsi256_si128(ordered), second = _mm256_extracti128_si256(ordered, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes),
                   kLoadsWide<T> ? _mm_unpacklo_epi32(first, second) : _mm_unpacklo_epi16(first, second));
  const __m256i even_rest = _mm256_slli_epi16(even_sums, 16 - kCodeBits), odd_rest = _mm256_slli_epi16(odd_sums, 16 - kCodeBits);
  const __m256i zero = _mm256_setzero_si256();
  if (_mm256_movemask_epi8(_mm256_cmpeq_epi16(_mm256_min_epu16(even_rest, odd_rest), zero))) [[unlikely]] {
    const __m256i even_open = _mm256_cmpeq_epi16(even_rest, zero), odd_open = _mm256_cmpeq_epi16(odd_rest, zero);
    const uint32_t open = uint32_t(_mm256_movemask_epi8(_mm256_packs_epi16(even_open, odd_open)));
    uint32_t which = 0;
    for (uint32_t rest = open; rest; rest &= rest - 1) {  // 8 even and 8 odd words of each lane -> elements
      const int bit = __builtin_ctz(rest), lane = bit / 16, is_odd = bit / 8 % 2, word = bit % 8, slot = word / 2;
      const int pair = kLoadsWide<T> ? 4 * lane + slot : 2 * lane + slot + (slot & 2);
      which |= 1u << (16 * (word % 2) + 2 * pair + is_odd);
    }
    decide<T, FP4>(x, reciprocal, which, codes);
  }
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

// int8 codes of 8 floats, in dwords. Beyond: they may be larger than kInt8Max by more than rounding.
template <bool Beyond>
inline __m256i encode_int8(__m256 v) {
  if (Beyond) v = _mm256_max_ps(_mm256_min_ps(v, _mm256_set1_ps(kInt8Max)), _mm256_set1_ps(-kInt8Max));
  return _mm256_cvtps_epi32(v);
}

// 32 elements -> 32 codes of x * factor.
template <class T, bool FP8, bool Beyond>
inline void encode_8bit(const T* x, float factor, uint8_t* codes) {
  const __m256 scale = _mm256_set1_ps(factor);
  __m256 v[4];
  __m256i code[4];
  load_group(x, v);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_mul_ps(v[i], scale);
    code[i] = FP8 ? encode_fp8(v[i]) : encode_int8<Beyond>(v[i]);
  }
  const __m256i bytes = pack_group<!FP8>(code);
  store_vector<false>(codes, kLoadsWide<T> ? _mm256_permute4x64_epi64(bytes, 0xD8)
                                           : _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}

}  // namespace
}  // namespace halfbyte::cpu
