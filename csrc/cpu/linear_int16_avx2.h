// linear on a few bf16 tokens with AVX2: 4-bit codes as int16 times activations as int16, 8 shuffles for 64 weights where exact fp32
// values take 24. Included after linear_decode_avx2.h.
//
// A group's activations are x * 2^k as int16, k the largest that fits: bf16 down to 1/128 of the group's largest stay what they
// are, smaller ones lose at most 2^-15 of the largest. That is no more than bf16 itself loses of the others, unless the largest is more
// than all others together: such groups, if an element loses anything, and those that are not finite keep bf16 and multiply exact
// weights.
#pragma once

#include "linear_pack.h"
#include "simd/avx2.h"

namespace halfbyte::cpu {
namespace {

// What the codebook is multiplied with before it is rounded to int16: the integer below 2^13 (8 products of that and of less than 2^15
// fit an int32) with the smallest relative errors: 2^-12.7 for nf4, none for fp4. (bf16 weights have 2^-9.)
constexpr float int16_steps(int32_t format) { return is_fp4(format) ? 8064.0f : 7854.0f; }

struct Int16 : Float32 {
  static constexpr Compute kCompute = Compute::kInt16;
  static constexpr bool kBFloat16By4Bit = true;
  static constexpr int kDirectTokens = 12;
};

// A prepared group: 64 words of each token, then 8 floats. The first are the tokens' factors, 0 where the words are bf16; the last is 1
// if one of them is.
constexpr int kWords = kGroup / 2;  // in floats
template <>
constexpr int direct_units<Int16>(int tokens) {
  return tokens * kWords + 8;
}
constexpr int kHasBFloat16Words = 7;
static_assert(kPassTokens <= kHasBFloat16Words);

// Words come out as 2 vectors of even elements, then 2 of odd ones; inside, as byte unpacking leaves them.
constexpr int word_at(int position) {
  const int vector = position / 16, lane = position / 8 % 2;
  return 2 * (16 * lane + 8 * (vector % 2) + position % 8) + vector / 2;
}

template <Codes codes>
struct Decoder<Int16, codes> {
  using Exact = Decoder<Float32, codes>;
  using DirectScales = typename Exact::DirectScales;
  static constexpr int kCodeBytes = Exact::kCodeBytes;
  Exact exact;
  __m256i low, high;  // bytes of the 16 codes
  Vector step;        // value of an int16's 1

  explicit Decoder(const RowLayout& l) : exact(l), step(_mm256_set1_ps(1.0f / int16_steps(l.format))) {
    uint8_t bytes[2][16];
    for (int c = 0; c < 16; ++c) {
      const auto code = int16_t(rintf(codebook(l.format)[c] * int16_steps(l.format)));
      bytes[0][c] = uint8_t(code), bytes[1][c] = uint8_t(code >> 8);
    }
    low = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes[0])));
    high = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes[1])));
  }

  void values(const uint8_t* c, __m256i v[4]) const {
    const __m256i mask = _mm256_set1_epi8(15);
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c));
    const __m256i even = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask), odd = _mm256_and_si256(bytes, mask);
    const __m256i even_low = _mm256_shuffle_epi8(low, even), even_high = _mm256_shuffle_epi8(high, even);
    const __m256i odd_low = _mm256_shuffle_epi8(low, odd), odd_high = _mm256_shuffle_epi8(high, odd);
    v[0] = _mm256_unpacklo_epi8(even_low, even_high);
    v[1] = _mm256_unpackhi_epi8(even_low, even_high);
    v[2] = _mm256_unpacklo_epi8(odd_low, odd_high);
    v[3] = _mm256_unpackhi_epi8(odd_low, odd_high);
  }
};

inline __m256i words_at(const float* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// sum + products of pairs of int16.
inline __m256i add_word_products(__m256i sum, __m256i a, __m256i b) {
#if defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}

// Sum of 64 products of int16 by lane, exact.
inline Vector product_of_words(const __m256i v[4], const float* x) {
  __m256i sum = _mm256_madd_epi16(v[0], words_at(x));
  for (int i = 1; i < 4; ++i) sum = add_word_products(sum, v[i], words_at(x + 8 * i));
  return _mm256_cvtepi32_ps(sum);
}

// Sum of 64 products of fp32 weights in decode order and bf16 words, by lane.
inline Vector product_of_bfloat16(const Vector v[8], const float* x) {
  Vector sum = zero_vector();
  for (int i = 0; i < 4; ++i) {
    const __m256i words = words_at(x + 8 * i), zero = _mm256_setzero_si256();
    sum = Float32::multiply_add(v[2 * i], _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, words)), sum);
    sum = Float32::multiply_add(v[2 * i + 1], _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, words)), sum);
  }
  return sum;
}

// Sums of a group's 64 products by lane, for each token, some of which have bf16 words.
template <int M, Codes codes>
[[gnu::noinline]] void products_of_mixed(const Decoder<Int16, codes>& decoder, const uint8_t* c, const float* x, Vector products[M]) {
  __m256i v[4];
  Vector exact[8];
  decoder.exact.values(c, exact);
  if constexpr (M > 1) decoder.values(c, v);
  for (int m = 0; m < M; ++m, x += kWords) {
    const float factor = x[(M - m) * kWords + m];
    if (M == 1 || factor == 0.0f) products[m] = product_of_bfloat16(exact, x);
    else products[m] = _mm256_mul_ps(product_of_words(v, x), _mm256_mul_ps(decoder.step, _mm256_set1_ps(factor)));
  }
}

template <int R, int M, Codes codes>
inline void direct_group(const Decoder<Int16, codes>& decoder, const uint8_t* c, int64_t, const ScalesInPlace* s, int64_t group,
                         const float* x, Vector sums[R][M]) {
  static_assert(R == 1);
  Vector* const sum = sums[0];
  const Vector scale = decoder.exact.scale(*s, group);
  const float* const factors = x + M * kWords;
  if (factors[kHasBFloat16Words] != 0.0f) [[unlikely]] {
    Vector products[M];  // not `sum`: what a call may write leaves the registers
    products_of_mixed<M>(decoder, c, x, products);
    for (int m = 0; m < M; ++m) sum[m] = Float32::multiply_add(scale, products[m], sum[m]);
    return;
  }
  __m256i v[4];
  decoder.values(c, v);
  const Vector step = _mm256_mul_ps(scale, decoder.step);
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    const Vector factor = _mm256_mul_ps(step, _mm256_broadcast_ss(factors + m));
    sum[m] = Float32::multiply_add(factor, product_of_words(v, x + m * kWords), sum[m]);
  }
}

// 64 elements as words in decode order; returns their factor.
inline float words_of_group(const BFloat16* x, int16_t* words) {
  Vector sums = zero_vector(), most = zero_vector();
  for (int i = 0; i < kGroup; i += 8) {
    const Vector magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), load_floats(x + i));
    sums = _mm256_add_ps(sums, magnitude);
    most = _mm256_max_ps(most, magnitude);
  }
  float of_lane[8], largest = 0.0f;
  _mm256_storeu_ps(of_lane, most);
  for (float magnitude : of_lane) largest = magnitude > largest ? magnitude : largest;
  const bool usual = largest < 0x1p64f && (largest > 0x1p-64f || largest == 0.0f);  // factors times scales stay normal
  const int exponent = !usual || largest == 0.0f ? 0 : int(float_bits(largest) >> 23) - 127;
  const float up = bits_float(uint32_t(127 + 14 - exponent) << 23);
  int16_t natural[kGroup];
  Vector lost = zero_vector();
  for (int i = 0; i < kGroup; i += 8) {
    const Vector scaled = _mm256_mul_ps(load_floats(x + i), _mm256_set1_ps(up));
    const __m256i whole = _mm256_cvtps_epi32(scaled);
    lost = _mm256_or_ps(lost, _mm256_cmp_ps(_mm256_cvtepi32_ps(whole), scaled, _CMP_NEQ_UQ));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(natural + i),
                     _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
  }
  const bool even = 2.0f * largest <= horizontal_sum(sums);  // false if an element is NaN
  if (!usual || (!even && _mm256_movemask_ps(lost) != 0)) {
    for (int i = 0; i < kGroup; ++i) memcpy(words + i, x + word_at(i), 2);
    return 0.0f;
  }
  for (int i = 0; i < kGroup; ++i) words[i] = natural[word_at(i)];
  return 1.0f / up;
}

// (tokens, K) -> prepared groups, the last one filled up with zeros.
template <class Product, Codes codes>
  requires(Product::kCompute == Compute::kInt16)
void pack_direct(const BFloat16* input, int64_t tokens, const RowLayout& l, void* units) {
  auto* out = static_cast<float*>(units);
  const int64_t K = l.in_features;
  for (int64_t start = 0; start < K; start += kGroup, out += direct_units<Int16>(int(tokens))) {
    float* const factors = out + tokens * kWords;
    factors[kHasBFloat16Words] = 0.0f;
    for (int64_t m = 0; m < tokens; ++m) {
      const BFloat16* x = input + m * K + start;
      BFloat16 padded[kGroup] = {};
      if (K - start < kGroup) {
        memcpy(padded, x, size_t(K - start) * sizeof(BFloat16));
        x = padded;
      }
      factors[m] = words_of_group(x, reinterpret_cast<int16_t*>(out + m * kWords));
      if (factors[m] == 0.0f) factors[kHasBFloat16Words] = 1.0f;
    }
  }
}

}  // namespace
}  // namespace halfbyte::cpu
