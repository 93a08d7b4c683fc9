// Vectors of 16 floats: the operations of optimizer_simd_scalar.h with AVX-512.
#pragma once

#include "../dynamic_map.h"
#include "simd/avx512.h"

namespace halfbyte::cpu::optimizer {
namespace {

constexpr int kWidth = 16;
// As in optimizer_simd_avx2.h: Zen 4 has no more places, but registers for twice as many. Without in_turn GCC finishes a vector before it
// takes the next.
constexpr int kByTurns = 8;
using Floats = __m512;
using Ints = __m512i;

// Which element each lane of a permutation takes.
template <class T, int N>
struct alignas(64) Places {
  T at[N];
};

inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Ints splat_bits(uint32_t x) { return _mm512_set1_epi32(int(x)); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
template <class T>
inline Floats load_as(const T* p) {
  return load_floats(p);
}
template <class T>
inline void load_pair_as(const T* p, Floats& a, Floats& b) {
  a = load_as(p), b = load_as(p + kWidth);
}
// A word goes to the upper half of its lane in one instruction, where an extension and a shift would be two.
inline void load_pair_as(const BFloat16* p, Floats& a, Floats& b) {
  static constexpr auto kPlaces = [] {
    Places<uint16_t, 64> places{};
    for (int i = 0; i < 64; ++i) places.at[i] = uint16_t(i / 2);
    return places;
  }();
  constexpr __mmask32 kUpperHalves = 0xAAAAAAAAu;
  const __m512i words = _mm512_loadu_si512(p);
  a = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(kUpperHalves, _mm512_load_si512(kPlaces.at), words));
  b = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(kUpperHalves, _mm512_load_si512(kPlaces.at + 32), words));
}
inline void store_as(float* p, Floats x) { _mm512_storeu_ps(p, x); }
// To nearest even, NaN quiet.
#if defined(__AVX512BF16__)
// These instructions flush subnormals, which are zero here already.
inline __m256i to_bfloat16(Floats x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
inline __m512i to_bfloat16(Floats a, Floats b) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)); }
#else
inline __m512i upper_bfloat16(Floats x) {  // the upper half of each lane; the lower one is waste
  const __m512i b = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), b, _mm512_set1_epi32(0x400000));
}
inline __m256i to_bfloat16(Floats x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(upper_bfloat16(x), 16)); }
inline __m512i to_bfloat16(Floats a, Floats b) { return upper_words(upper_bfloat16(a), upper_bfloat16(b)); }
#endif
inline __m256i to_float16(Floats x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void store_as(BFloat16* p, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bfloat16(x)); }
inline void store_pair_as(BFloat16* p, Floats a, Floats b) { _mm512_storeu_si512(p, to_bfloat16(a, b)); }
inline void store_as(Float16* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_float16(x));
}
template <class T>
inline void store_pair_as(T* p, Floats a, Floats b) {
  store_as(p, a);
  store_as(p + kWidth, b);
}

inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats square_root(Floats a) { return _mm512_sqrt_ps(a); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Ints bits(Floats a) { return _mm512_castps_si512(a); }
inline Floats from_bits(Ints a) { return _mm512_castsi512_ps(a); }
inline Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints bit_xor(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
template <int BY>
inline Ints shift_right(Ints a) {
  return _mm512_srli_epi32(a, BY);
}
inline Ints maximum_unsigned(Ints a, Ints b) { return _mm512_max_epu32(a, b); }
inline Floats larger_magnitude(Floats a, Floats b) {
  constexpr int kOfMagnitudes = 0x3, kPositive = 0x8;
  return _mm512_range_ps(a, b, kOfMagnitudes | kPositive);
}
inline Ints minimum_halves(Ints a, Ints b) { return _mm512_min_epu16(a, b); }
inline bool any_below(Ints a, uint32_t limit) { return _mm512_cmplt_epu32_mask(a, splat_bits(limit)) != 0; }
inline bool any_half_below(Ints a, uint32_t limit) {
  return _mm512_cmplt_epu16_mask(a, _mm512_set1_epi16(int16_t(limit))) != 0;
}
inline uint32_t lower_halves_below(Ints a, uint32_t limit) {
  return _mm512_cmplt_epu32_mask(_mm512_and_si512(a, splat_bits(0xFFFFu)), splat_bits(limit));
}
inline uint32_t largest(Ints a) { return _mm512_reduce_max_epu32(a); }

// round_to of 2 vectors of finite numbers; false: one is not, and nothing is stored.
inline bool store_pair_up(BFloat16* p, Floats a, Floats b, const uint16_t* random) {
  constexpr int kInfOrNaN = 0x99;
  if (_mm512_fpclass_ps_mask(a, kInfOrNaN) | _mm512_fpclass_ps_mask(b, kInfOrNaN)) [[unlikely]] return false;
  const auto up = [](Floats x, const uint16_t* more) {
    return add_ints(bits(x), _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(more))));
  };
  _mm512_storeu_si512(p, upper_words(up(a, random), up(b, random + kWidth)));
  return true;
}

// `a` itself: what is computed by turns (kByTurns) has its turn here.
inline Floats in_turn(Floats a) {
  asm volatile("" : "+v"(a));
  return a;
}

inline Ints lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline Floats load_row_values(const float* p, int length) {
  if (length >= kWidth) return _mm512_set1_ps(*p);
  const unsigned shift = unsigned(__builtin_ctz(unsigned(length)));
  const __mmask16 present = __mmask16((1u << (unsigned(kWidth) >> shift)) - 1u);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(lane_numbers(), shift), _mm512_maskz_loadu_ps(present, p));
}
inline Ints largest_of_rows(Ints a, int length) {
  for (int step = 1; step < kWidth && step < length; step *= 2)
    a = maximum_unsigned(a, _mm512_permutexvar_epi32(bit_xor(lane_numbers(), splat_bits(uint32_t(step))), a));
  return a;
}

inline Floats lookup8(const float* table, Ints index) {
  // The table holds its 8 entries twice, so bit 3 of the index does not matter.
  return _mm512_permutexvar_ps(index, _mm512_load_ps(table));
}
inline Floats xor_sign(Floats a, Floats test) {
  return from_bits(_mm512_ternarylogic_epi32(bits(a), bits(test), splat_bits(0x80000000u), 0x78));  // a ^ (test & sign)
}
inline Floats keep_if_nonzero(Floats a, Floats test) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test, _mm512_setzero_ps(), _CMP_NEQ_UQ), a);
}
inline Floats if_greater(Floats x, Floats y, Floats a, Floats b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), b, a);
}
inline Floats code_floats(__m128i codes) {
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_cvtepu8_epi32(codes), splat_bits(0x4C000000u)));
}
inline Floats code_floats(const uint8_t* p) { return code_floats(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline __mmask16 first_lanes(int64_t count) { return __mmask16((1u << count) - 1u); }
inline Floats load_first(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }
inline Floats load_first(const BFloat16* p, int64_t count) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}
inline Floats load_first(const Float16* p, int64_t count) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}
inline void store_first(float* p, Floats x, int64_t count) { _mm512_mask_storeu_ps(p, first_lanes(count), x); }
inline void store_first(BFloat16* p, Floats x, int64_t count) {
  _mm256_mask_storeu_epi16(p, first_lanes(count), to_bfloat16(x));
}
inline void store_first(Float16* p, Floats x, int64_t count) {
  _mm256_mask_storeu_epi16(p, first_lanes(count), to_float16(x));
}
inline Floats code_floats_of_first(const uint8_t* p, int64_t count, uint8_t rest) {
  return code_floats(_mm_mask_loadu_epi8(_mm_set1_epi8(char(rest)), first_lanes(count), p));
}
// Positive words for positive floats, 0 for zero and negative words for negative floats, of two vectors in the order of packs:
// saturation turns their bits into the largest and the smallest numbers. Their upper bytes are like them.
[[gnu::always_inline]] inline __m512i mixed_signs(const float* x) { return _mm512_packs_epi32(bits(load(x)), bits(load(x + 16))); }

// Codes of 4 vectors to code_floats; byte 2 of 4 vectors' lanes, their signs as bytes, and codes stored.
using Codes = __m512i;
#if defined(__AVX512VBMI__)
using CodeGroup = __m512i;
inline CodeGroup load_code_group(const uint8_t* p) { return _mm512_loadu_si512(p); }
// One instruction puts a code into the last byte of each lane, where an extension and an "or" would be two.
inline Floats code_floats(const CodeGroup& group, int j) {
  static constexpr auto kPlaces = [] {
    Places<uint8_t, 256> places{};
    for (int i = 0; i < 256; ++i) places.at[i] = uint8_t(i / 4);
    return places;
  }();
  constexpr __mmask64 kLastBytes = 0x1111111111111111u;
  const __m512i places = _mm512_load_si512(kPlaces.at + 64 * j);
  return _mm512_castsi512_ps(_mm512_mask_permutexvar_epi8(splat_bits(0x4C000000u), kLastBytes, places, group));
}
[[gnu::always_inline]] inline Codes unsigned_codes(const Ints (&words)[4]) {
  static constexpr auto kPlaces = [] {
    Places<uint8_t, 64> places{};
    for (int i = 0; i < 64; ++i) places.at[i] = uint8_t(4 * (i % 32) + 2);
    return places;
  }();
  const __m512i places = _mm512_load_si512(kPlaces.at);
  const __m512i upper = _mm512_permutex2var_epi8(words[2], places, words[3]);
  return _mm512_inserti64x4(_mm512_permutex2var_epi8(words[0], places, words[1]), _mm512_castsi512_si256(upper), 1);
}
[[gnu::always_inline]] inline __m512i signs_of(const float* x) {
  static constexpr auto kPlaces = [] {
    Places<uint8_t, 64> places{};
    for (int i = 0; i < 64; ++i) places.at[i] = uint8_t(i / 32 * 64 + i % 16 / 4 * 16 + i / 16 % 2 * 8 + i % 4 * 2 + 1);
    return places;
  }();
  return _mm512_permutex2var_epi8(mixed_signs(x), _mm512_load_si512(kPlaces.at), mixed_signs(x + 32));
}
[[gnu::always_inline]] inline void store_codes(uint8_t* p, Codes codes) { _mm512_storeu_si512(p, codes); }
#else
using CodeGroup = const uint8_t*;
inline CodeGroup load_code_group(const uint8_t* p) { return p; }
inline Floats code_floats(CodeGroup group, int j) { return code_floats(group + j * kWidth); }
// 4 of each vector, order mixed by 128 bits, until they are stored.
[[gnu::always_inline]] inline Codes unsigned_codes(const Ints (&words)[4]) {
  const auto upper = [](__m512i a, __m512i b) {
    return _mm512_and_si512(_mm512_packus_epi32(_mm512_srli_epi32(a, 16), _mm512_srli_epi32(b, 16)), _mm512_set1_epi16(0xFF));
  };
  return _mm512_packus_epi16(upper(words[0], words[1]), upper(words[2], words[3]));
}
[[gnu::always_inline]] inline __m512i signs_of(const float* x) { return _mm512_packs_epi16(mixed_signs(x), mixed_signs(x + 32)); }
[[gnu::always_inline]] inline void store_codes(uint8_t* p, Codes codes) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, codes));
}
#endif

[[gnu::always_inline]] inline Codes signed_codes(const Ints (&words)[4], const float* x) {
  const __m512i m = unsigned_codes(words), zero = _mm512_set1_epi8(127);
  return _mm512_mask_subs_epu8(_mm512_add_epi8(zero, m), _mm512_movepi8_mask(signs_of(x)), zero, m);
}
inline bool any_half_below_or_zero(Ints a, uint32_t limit, Codes codes) {
  return (_mm512_cmplt_epu16_mask(a, _mm512_set1_epi16(int16_t(limit))) | _mm512_testn_epi8_mask(codes, codes)) != 0;
}
inline Codes positive_not_zero(Codes codes, const float* x) {
  return _mm512_max_epu8(codes, _mm512_min_epu8(signs_of(x), _mm512_set1_epi8(1)));
}

}  // namespace
}  // namespace halfbyte::cpu::optimizer

#include "optimizer_class_pairs.h"
