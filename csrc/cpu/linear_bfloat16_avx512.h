// linear on bf16 with AVX-512's bf16 units: pairs of elements, weights rounded to bf16 as in a dense bf16 layer. Included after
// linear_decode_avx512.h.
#pragma once

#include "linear_decode_avx512.h"
#include "simd/avx512.h"

namespace halfbyte::cpu {
namespace {

// The CPU's two instructions on bf16; with HALFBYTE_EMULATE_BF16 (tests/test_amx_kernels.py) what does the same without.
#if !defined(HALFBYTE_EMULATE_BF16)
inline __m512i round_pair(__m512 low, __m512 high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)); }
inline __m512 add_products(__m512i a, __m512i b, __m512 sum) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
#else
inline __m512i round_pair(__m512 low, __m512 high) { return narrow_floats<BFloat16>(low, high); }
inline __m512 add_products(__m512i a, __m512i b, __m512 sum) {
  const auto odd = [](__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int32_t(0xFFFF0000)))); };
  const auto even = [](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
  return _mm512_fmadd_ps(even(a), even(b), _mm512_fmadd_ps(odd(a), odd(b), sum));
}
#endif

// Two bf16 elements in each unit: vdpbf16ps adds both products to one fp32 sum.
struct BFloat16Pairs {
  static constexpr Compute kCompute = Compute::kBFloat16;
  static constexpr bool kBFloat16By4Bit = false;
  static constexpr int kDirectTokens = 8;
  static constexpr TurnedFrom kTurnedFrom{64, 16, 3, 6};
  static constexpr int kVectors = 4;
  static constexpr int kUnitElements = 2;
  using Element = BFloat16;
  using Values = __m512i;
  using Sum = Vector;
  static Sum load_sums(const float* p) { return _mm512_loadu_ps(p); }
  static void store_sums(float* p, Sum v) { _mm512_storeu_ps(p, v); }
#if !defined(HALFBYTE_EMULATE_BF16)
  // vdpbf16ps and tdpbf16ps give no subnormal sums, which this instruction would flush.
  static void store_rounded(BFloat16* out, Sum low, Sum high) { _mm512_storeu_si512(out, round_pair(low, high)); }
  static Vector round_pairs(Sum even, Sum odd) {
    const __m512i places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                            23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(places, round_pair(even, odd)));
  }
#endif
  static Values load(const float* p) { return _mm512_loadu_si512(p); }
  static Values broadcast(const float* p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
  }
  static Vector multiply_add(Values a, Values b, Vector sum) { return add_products(a, b, sum); }
  // Column c of what interleave_in_lanes gives.
  static constexpr int interleaved_at(int c) { return c / 32 * 32 + c % 16 / 4 * 8 + c % 32 / 16 * 4 + c % 4; }
};

// 128 bf16 in the order of element_at: word i of vector j is element 4 i + (j ^ 1).
inline void order_words(const BFloat16* x, BFloat16* out) {
  const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + 32), c = _mm512_loadu_si512(x + 64), d = _mm512_loadu_si512(x + 96);
  const __m512i fourth = _mm512_set_epi16(60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0,  //
                                          60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i index = _mm512_add_epi16(fourth, _mm512_set1_epi16(int16_t(j ^ 1)));
    const __m512i low = _mm512_permutex2var_epi16(a, index, b), high = _mm512_permutex2var_epi16(c, index, d);
    _mm512_storeu_si512(out + 32 * j, _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1));
  }
}

// `count` units of 16 tokens, `stride` elements apart, in the order of element_at, or of decode_row if they are half of a group: unit by
// unit, `width` units apart. Tokens from `tokens` on, and elements from `elements` on, are zeros.
template <class Product, Codes codes>
  requires(Product::kCompute == Compute::kBFloat16)
inline void turn_group(const BFloat16* x, int64_t stride, int64_t tokens, int64_t elements, int64_t count, float* out, int64_t width) {
  // The pair of elements i and i + 4 of 8 is what two shifted words of codes give.
  const __m512i pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  for (int64_t first = 0; first < count; first += 16, x += 32, elements -= 32) {
    const __mmask32 mask = elements >= 32 ? ~0u : elements <= 0 ? 0u : (1u << elements) - 1u;
    const auto row = [&](int i) __attribute__((always_inline)) {
      if (i >= tokens) return _mm512_setzero_ps();
      const BFloat16* p = x + i * stride;
      prefetch(p + 128);  // too many rows for the CPU to see it
      const __m512i words = _mm512_maskz_loadu_epi16(mask, p);
      return _mm512_castsi512_ps(four_bit(codes) ? _mm512_shuffle_epi8(words, pairs) : words);
    };
    turn_rows(row, [&](int i, __m512 unit) __attribute__((always_inline)) {
      const int64_t at = four_bit(codes) ? (i % 4 ^ 1) * (count / 4) + first / 4 + i / 4 : first + i;
      _mm512_storeu_ps(out + at * width, unit);
    });
  }
}

// What the codes 0 to 127 of a format stand for; fp8: divided by 256, as fp8_values gives them.
struct Magnitudes {
  alignas(64) float int8[128], fp8[128];

  constexpr Magnitudes() : int8(), fp8() {
    for (int i = 0; i < 128; ++i) {
      int8[i] = float(i);
      float power = 1.0f / (1 << 17);  // of a step of the subnormal numbers
      for (int e = 1; e < i / 8; ++e) power *= 2.0f;
      fp8[i] = float(i < 8 ? i : 8 + i % 8) * power;
    }
    fp8[127] = __builtin_nanf("");
  }
};
constexpr Magnitudes kMagnitudes;

// A row of 8-bit codes for bf16 products: every magnitude times the row's scale, rounded to bf16 once, as two tables of
// bytes. Two look-ups of 64 bytes each take the place of three conversions and a product for every 16 codes.
struct RowTable : RowScale {
  __m512i low[2], high[2];

  void load(const uint8_t* row, const RowLayout& l, const Places& = {}) {
    RowScale::load(row, l);
    const __m512 factor = _mm512_set1_ps(l.format == kFP8 ? value * 256.0f : value);
    const __m512i even_bytes = _mm512_set_epi8(126, 124, 122, 120, 118, 116, 114, 112, 110, 108, 106, 104, 102, 100, 98, 96,  //
                                               94, 92, 90, 88, 86, 84, 82, 80, 78, 76, 74, 72, 70, 68, 66, 64,              //
                                               62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32,              //
                                               30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd_bytes = _mm512_or_si512(even_bytes, _mm512_set1_epi8(1));
    const float* magnitudes = l.format == kFP8 ? kMagnitudes.fp8 : kMagnitudes.int8;
    __m512i words[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512 exact[2];
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) exact[j] = _mm512_mul_ps(_mm512_load_ps(magnitudes + 32 * i + 16 * j), factor);
      words[i] = round_pair(exact[0], exact[1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_permutex2var_epi8(words[2 * i], even_bytes, words[2 * i + 1]);
      high[i] = _mm512_permutex2var_epi8(words[2 * i], odd_bytes, words[2 * i + 1]);
    }
  }
};

template <Codes codes>
struct BFloat16Scales : ScaleTypes<RowTable> {};
template <Codes codes>
  requires(four_bit(codes))
struct BFloat16Scales<codes> : ScalesOf<codes> {};

template <Codes codes>
struct Decoder<BFloat16Pairs, codes> : BFloat16Scales<codes> {
  using Exact = Decoder<Float32, codes>;
  static constexpr int kCodeBytes = Exact::kCodeBytes;
  Exact exact;

  explicit Decoder(const RowLayout& l) : exact(l) {}

  // Two blocks' codebooks times their scales, rounded to bf16: the values `dequantize` gives.
  __m512i rounded_tables(float scale_low, float scale_high) const {
    return round_pair(_mm512_mul_ps(exact.table, _mm512_set1_ps(scale_low)), _mm512_mul_ps(exact.table, _mm512_set1_ps(scale_high)));
  }

  // kInOrder, kCount: as Decoder<Float32>'s.
  template <bool kInOrder = false, int kCount = 4, class Scales>
  [[gnu::always_inline]] void scaled(const uint8_t* c, const Scales& s, int64_t group, __m512i v[4]) const {
    if constexpr (four_bit(codes)) {
      const __m512i bytes = _mm512_loadu_si512(c), mask = _mm512_set1_epi16(15);
      const int64_t step = 4 * group;
      if constexpr (kInOrder) {
        const __m512i word = _mm512_set_epi16(7, 7, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4,  //
                                              3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
        const __m512i nibble = _mm512_set1_epi64(0x0008'000C'0000'0004);
        constexpr bool kBlocksOf32 = codes == Codes::kFourBit32;  // else the first two steps have one scale, and the last two
        const auto tables = [&](int64_t a, int64_t b) { return rounded_tables(s.at(step + a), s.at(step + b)); };
        const __m512i low = kBlocksOf32 ? tables(0, 1) : kCount > 2 ? tables(0, 2) : tables(0, 0);
        const __m512i high = kBlocksOf32 && kCount > 2 ? tables(2, 3) : low;
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) {
          const __m512i codes_of_32 = _mm512_permutexvar_epi16(_mm512_add_epi16(word, _mm512_set1_epi16(int16_t(8 * i))), bytes);
          const __m512i base = _mm512_set1_epi16(int16_t((kBlocksOf32 ? i % 2 : i / 2) * 16));
          v[i] = _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(_mm512_srlv_epi16(codes_of_32, nibble), mask, base, 0xEA),
                                          i < 2 ? low : high);
        }
        return;
      }
      if constexpr (codes == Codes::kFourBit32) {
        const __m512i low = rounded_tables(s.at(step), s.at(step + 1)), high = rounded_tables(s.at(step + 2), s.at(step + 3));
        const __m512i base = _mm512_inserti64x4(_mm512_castsi256_si512(block_base(0, 16)), block_base(32, 48), 1);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const __m512i index = _mm512_ternarylogic_epi32(_mm512_srli_epi16(bytes, 4 * i), mask, base, 0xEA);  // (a & b) | c
          v[i] = _mm512_permutex2var_epi16(low, index, high);
        }
      } else {
        const __m512i both = rounded_tables(s.at(step), s.at(step + 2));
        const __m512i base = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          v[i] = _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(_mm512_srli_epi16(bytes, 4 * i), mask, base, 0xEA), both);
      }
    } else {
      const __m512i sign = _mm512_set1_epi8(int8_t(0x80));
      const __m512i halves = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // unpacking then leaves elements in order
      __m512i bytes[2];
      for (int i = 0; i < 2; ++i) bytes[i] = _mm512_permutexvar_epi64(halves, _mm512_loadu_si512(c + 64 * i));
      if constexpr (codes == Codes::kInt8) {
        // -128 is no magnitude of the table; `quantize` never writes it.
        if (_mm512_cmpeq_epi8_mask(bytes[0], sign) | _mm512_cmpeq_epi8_mask(bytes[1], sign)) return converted(c, s, v);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m512i magnitude = codes == Codes::kInt8 ? _mm512_abs_epi8(bytes[i]) : bytes[i];  // look-ups use 7 bits
        const __m512i low = _mm512_permutex2var_epi8(s.low[0], magnitude, s.low[1]);
        __m512i high = _mm512_permutex2var_epi8(s.high[0], magnitude, s.high[1]);
        high = _mm512_ternarylogic_epi32(high, bytes[i], sign, 0xF8);  // a | (b & c)
        v[2 * i] = _mm512_unpacklo_epi8(low, high);
        v[2 * i + 1] = _mm512_unpackhi_epi8(low, high);
      }
    }
  }

  [[gnu::noinline]] void converted(const uint8_t* c, const RowScale& s, __m512i v[4]) const {
    __m512 values[8];
    exact.scaled(c, s, 0, values);
    for (int i = 0; i < 4; ++i) v[i] = round_pair(values[2 * i], values[2 * i + 1]);
  }

  static __m256i block_base(int16_t low, int16_t high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_set1_epi16(low)), _mm_set1_epi16(high), 1);
  }
};

// 32 columns each in kCount vectors of rows n (even) and n + 1 (odd) as pairs: column c of `out` holds both rows' elements. Order is kept.
template <int kCount>
inline void interleave(const __m512i* even, const __m512i* odd, __m512i* out) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
    out[2 * i] = _mm512_permutex2var_epi16(even[i], low, odd[i]);
    out[2 * i + 1] = _mm512_permutex2var_epi16(even[i], high, odd[i]);
  }
}

// As interleave, by a cheaper instruction, which leaves column BFloat16Pairs::interleaved_at(c) as column c of `out`.
inline void interleave_in_lanes(const __m512i* even, const __m512i* odd, __m512i* out) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = _mm512_unpacklo_epi16(even[i], odd[i]);
    out[2 * i + 1] = _mm512_unpackhi_epi16(even[i], odd[i]);
  }
}

}  // namespace
}  // namespace halfbyte::cpu
