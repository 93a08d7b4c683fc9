// Vectors of 8 floats: the operations of optimizer_simd_scalar.h with AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "../dynamic_map.h"
#include "simd/avx2.h"

namespace halfbyte::cpu::optimizer {
namespace {

constexpr int kWidth = 8;
// The encoder takes a step of so many vectors before the next step: a chain of 45 cycles would fill the 64 places where Zen 3's vector
// instructions wait for their operands.
constexpr int kByTurns = 4;
using Floats = __m256;
using Ints = __m256i;

// A constant of every lane that comes from memory: GCC makes what it sees to be one anew in every step, by three instructions.
template <uint32_t LANE>
[[gnu::always_inline]] inline Ints from_memory() {
  alignas(32) static constexpr uint32_t kLanes[kWidth] = {LANE, LANE, LANE, LANE, LANE, LANE, LANE, LANE};
  Ints lanes;
  asm("vmovdqa %1, %0" : "=x"(lanes) : "m"(kLanes));
  return lanes;
}

inline Ints bits(Floats a) { return _mm256_castps_si256(a); }
inline Floats splat(float x) { return _mm256_set1_ps(x); }
inline Ints splat_bits(uint32_t x) { return _mm256_set1_epi32(int(x)); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
template <class T>
inline Floats load_as(const T* p) {
  return load_floats(p);
}
template <class T>
inline void load_pair_as(const T* p, Floats& a, Floats& b) {
  a = load_as(p), b = load_as(p + kWidth);
}
inline void store_as(float* p, Floats x) { _mm256_storeu_ps(p, x); }
// bf16 in the lower half of each lane: to nearest even, NaN quiet.
inline __m256i to_bfloat16(Floats x) {
  const __m256i b = _mm256_castps_si256(x), upper = _mm256_srli_epi32(b, 16);
  const __m256i even = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(b, _mm256_add_epi32(even, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline void store_as(BFloat16* p, Floats x) {
  const __m256i half = to_bfloat16(x);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
[[gnu::always_inline]] inline void store_pair_as(BFloat16* p, Floats a, Floats b) {
  const __m256 nan = _mm256_cmp_ps(a, b, _CMP_UNORD_Q);
  if (!_mm256_testz_ps(nan, nan)) [[unlikely]] {
    store_as(p, a);
    store_as(p + kWidth, b);
    return;
  }
  const Ints lowest_kept = from_memory<0x10000>(), below_half = from_memory<0x7FFF>();
  const auto rounded = [&](Floats x) { return round_bf16(x, lowest_kept, below_half); };
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), upper_words(rounded(a), rounded(b)));
}
inline void store_as(Float16* p, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
template <class T>
inline void store_pair_as(T* p, Floats a, Floats b) {
  store_as(p, a);
  store_as(p + kWidth, b);
}

inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats square_root(Floats a) { return _mm256_sqrt_ps(a); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats minimum(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats from_bits(Ints a) { return _mm256_castsi256_ps(a); }
inline Ints bit_and(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints bit_xor(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
template <int BY>
inline Ints shift_right(Ints a) {
  return _mm256_srli_epi32(a, BY);
}
template <int BY>
inline Ints shift_left(Ints a) {
  return _mm256_slli_epi32(a, BY);
}
inline Ints maximum_unsigned(Ints a, Ints b) { return _mm256_max_epu32(a, b); }
inline Floats larger_magnitude(Floats a, Floats b) {
  const Ints magnitude = splat_bits(0x7FFFFFFFu);
  return from_bits(maximum_unsigned(bit_and(bits(a), magnitude), bit_and(bits(b), magnitude)));
}
inline Ints minimum_halves(Ints a, Ints b) { return _mm256_min_epu16(a, b); }
inline bool any_below(Ints a, uint32_t limit) {
  const __m256i below = _mm256_cmpeq_epi32(_mm256_min_epu32(a, splat_bits(limit - 1)), a);
  return !_mm256_testz_si256(below, below);
}
inline __m256i halves_below(Ints a, uint32_t limit) {
  return _mm256_cmpeq_epi16(_mm256_min_epu16(a, _mm256_set1_epi16(int16_t(limit - 1))), a);
}
inline bool any_half_below(Ints a, uint32_t limit) {
  const __m256i below = halves_below(a, limit);
  return !_mm256_testz_si256(below, below);
}
inline uint32_t lower_halves_below(Ints a, uint32_t limit) {
  const __m256i below = _mm256_cmpgt_epi32(splat_bits(limit), _mm256_and_si256(a, splat_bits(0xFFFFu)));
  return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(below)));
}
inline uint32_t largest(Ints a) {
  __m128i x = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4E));
  x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xB1));
  return uint32_t(_mm_cvtsi128_si32(x));
}

// round_to of 2 vectors of finite numbers; false: one is not, and nothing is stored.
inline bool store_pair_up(BFloat16* p, Floats a, Floats b, const uint16_t* random) {
  const Ints magnitude = splat_bits(0x7FFFFFFFu), largest_finite = splat_bits(0x7F7FFFFFu);
  const Ints most = maximum_unsigned(bit_and(bits(a), magnitude), bit_and(bits(b), magnitude));
  const Ints above = _mm256_cmpgt_epi32(most, largest_finite);
  if (!_mm256_testz_si256(above, above)) [[unlikely]] return false;
  const auto up = [](Floats x, const uint16_t* more) {
    return add_ints(bits(x), _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(more))));
  };
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), upper_words(up(a, random), up(b, random + kWidth)));
  return true;
}

// See optimizer_simd_avx512.h: here GCC keeps the order by itself.
inline Floats in_turn(Floats a) { return a; }

inline Ints lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline Floats load_row_values(const float* p, int length) {
  if (length >= kWidth) return _mm256_broadcast_ss(p);
  const __m128i shift = _mm_cvtsi32_si128(__builtin_ctz(unsigned(length)));
  const __m256i row = _mm256_srl_epi32(lane_numbers(), shift), count = _mm256_srl_epi32(_mm256_set1_epi32(kWidth), shift);
  return _mm256_permutevar8x32_ps(_mm256_maskload_ps(p, _mm256_cmpgt_epi32(count, lane_numbers())), row);
}
inline Ints largest_of_rows(Ints a, int length) {
  for (int step = 1; step < kWidth && step < length; step *= 2)
    a = maximum_unsigned(a, _mm256_permutevar8x32_epi32(a, bit_xor(lane_numbers(), splat_bits(uint32_t(step)))));
  return a;
}

// With the table as an operand from memory the permutation takes 2 cycles on Zen 3, loaded before it 1.
inline Floats lookup8(const float* table, Ints index) {
  Floats values = _mm256_load_ps(table);
  asm("" : "+x"(values) : "x"(index));
  return _mm256_permutevar8x32_ps(values, index);
}
inline Floats xor_sign(Floats a, Floats test) {
  return _mm256_xor_ps(a, _mm256_and_ps(test, _mm256_set1_ps(-0.0f)));
}
inline Floats keep_if_nonzero(Floats a, Floats test) {
  return _mm256_and_ps(a, _mm256_cmp_ps(test, _mm256_setzero_ps(), _CMP_NEQ_UQ));
}
inline Floats if_greater(Floats x, Floats y, Floats a, Floats b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_GT_OQ));
}
inline Ints add_if_greater(Ints a, Floats x, Floats y) {
  return _mm256_sub_epi32(a, _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_GT_OQ)));
}
inline Ints class_guess(Floats a, int32_t offset) {
  // The upper half of each 32-bit lane is 0, so the 16-bit operations act on the lower half alone.
  const __m256i upper = _mm256_srli_epi32(_mm256_castps_si256(a), 16);
  return _mm256_mulhi_epu16(_mm256_subs_epu16(upper, _mm256_set1_epi32(offset)), _mm256_set1_epi32(153));
}

inline Floats code_floats(const uint8_t* p) {
  const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return from_bits(_mm256_or_si256(codes, splat_bits(0x4C000000u)));
}
template <class T>
inline Floats load_first(const T* p, int64_t count) {
  T copy[kWidth] = {};
  memcpy(copy, p, size_t(count) * sizeof(T));
  return load_as(copy);
}
template <class T>
inline void store_first(T* p, Floats x, int64_t count) {
  T copy[kWidth];
  store_as(copy, x);
  memcpy(p, copy, size_t(count) * sizeof(T));
}
inline Floats code_floats_of_first(const uint8_t* p, int64_t count, uint8_t rest) {
  uint8_t copy[kWidth];
  memset(copy, rest, kWidth);
  memcpy(copy, p, size_t(count));
  return code_floats(copy);
}
using CodeGroup = const uint8_t*;
inline CodeGroup load_code_group(const uint8_t* p) { return p; }
inline Floats code_floats(CodeGroup group, int j) { return code_floats(group + j * kWidth); }
using Codes = __m256i;  // those of 4 vectors, in dwords of one vector's by 128 bits: order mixed
[[gnu::always_inline]] inline void store_codes(uint8_t* p, Codes codes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}
// 127 for positive, 0 for zero and -128 for negative floats, in that order: saturation turns their bits into the largest and the
// smallest number.
[[gnu::always_inline]] inline Codes signs(const float* x) {
  const auto words = [&](int i) { return _mm256_packs_epi32(bits(load(x + i)), bits(load(x + i + kWidth))); };
  return _mm256_packs_epi16(words(0), words(2 * kWidth));
}
// The codes are the third byte of each lane.
[[gnu::always_inline]] inline Codes unsigned_codes(const Ints (&words)[4]) {
  const auto bytes = [&]<int J>() __attribute__((always_inline)) {
    const auto at = [](int place, int from) { return char(place == J ? from : -1); };
    const __m128i places = _mm_setr_epi8(at(0, 2), at(0, 6), at(0, 10), at(0, 14), at(1, 2), at(1, 6), at(1, 10), at(1, 14),  //
                                         at(2, 2), at(2, 6), at(2, 10), at(2, 14), at(3, 2), at(3, 6), at(3, 10), at(3, 14));
    return _mm256_shuffle_epi8(words[J], _mm256_broadcastsi128_si256(places));
  };
  return _mm256_or_si256(_mm256_or_si256(bytes.template operator()<0>(), bytes.template operator()<1>()),
                         _mm256_or_si256(bytes.template operator()<2>(), bytes.template operator()<3>()));
}
[[gnu::always_inline]] inline Codes signed_codes(const Ints (&words)[4], const float* x) {
  const __m256i m = unsigned_codes(words), zero = from_memory<0x7F7F7F7F>();
  return _mm256_blendv_epi8(_mm256_add_epi8(zero, m), _mm256_subs_epu8(zero, m), signs(x));
}
inline bool any_half_below_or_zero(Ints a, uint32_t limit, Codes codes) {
  const __m256i either = _mm256_or_si256(halves_below(a, limit), _mm256_cmpeq_epi8(codes, _mm256_setzero_si256()));
  return !_mm256_testz_si256(either, either);
}
inline Codes positive_not_zero(Codes codes, const float* x) {
  return _mm256_max_epu8(codes, _mm256_min_epu8(signs(x), _mm256_set1_epi8(1)));
}

}  // namespace
}  // namespace halfbyte::cpu::optimizer

#include "optimizer_class.h"
