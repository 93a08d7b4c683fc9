// Vectors and decoders of `linear` for AVX-512, all but those of bf16 products (linear_bfloat16_avx512.h). Included once per ISA.
#pragma once

#include <immintrin.h>

#include "linear_products.h"
#include "linear_scales.h"
#include "simd/avx512.h"

namespace halfbyte::cpu {
namespace {

constexpr int kLanes = 16;
constexpr int kGroup = 128;
constexpr int kTileVectors = 4;  // backward: the micro-kernel holds 6 x 4 sums, 4 vectors and 1 broadcast in 32 registers

// Whose cores these flags stand for: AMD's have bf16 units and no tiles.
#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
constexpr bool kIntel = false;
#else
constexpr bool kIntel = true;
#endif
// Whether micro-kernels ask for the panel that they stream from L2, one instruction in ten. Intel's cores find it themselves, and where
// their other thread is at work the two share what decodes instructions.
constexpr bool kFetchPanels = !kIntel;

using Vector = __m512;

struct Float32 {
  static constexpr Compute kCompute = Compute::kFloat32;
  static constexpr bool kBFloat16By4Bit = false;
  static constexpr int kDirectTokens = kIntel ? 8 : 12;
  static constexpr TurnedFrom kTurnedFrom = kIntel ? TurnedFrom::always() : TurnedFrom{64, INT32_MAX, INT32_MAX, 3};
  static constexpr int kVectors = 8;
  static constexpr int kUnitElements = 1;
  using Element = float;
  using Values = __m512;
  using Sum = Vector;
  static Sum load_sums(const float* p) { return _mm512_loadu_ps(p); }
  static void store_sums(float* p, Sum v) { _mm512_storeu_ps(p, v); }
  static Values load(const float* p) { return _mm512_loadu_ps(p); }
  static Values broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static Vector multiply_add(Values a, Values b, Vector sum) { return _mm512_fmadd_ps(a, b, sum); }
};

inline Vector zero_vector() { return _mm512_setzero_ps(); }
inline void store_values(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
inline void store_values(float* p, __m512i v) { _mm512_storeu_si512(p, v); }
inline __m512i join_lower_halves(__m512i a, __m512i b) { return _mm512_inserti64x4(a, _mm512_castsi512_si256(b), 1); }
inline __m512 join_lower_halves(__m512 a, __m512 b) { return _mm512_insertf32x8(a, _mm512_castps512_ps256(b), 1); }
inline Vector keep_lanes(Vector v, uint32_t bits) { return _mm512_maskz_mov_ps(__mmask16(bits), v); }
inline float horizontal_sum(Vector v) { return _mm512_reduce_add_ps(v); }

// A block of kLanes x kLanes units, transposed: put(i, column i) of rows row(0) to row(15).
template <class Row, class Put>
[[gnu::always_inline]] inline void turn_rows(const Row& row, const Put& put) {
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = row(i);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xEE);
    a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
  }
  // a[4 j + c], 128-bit lane q: column 4 q + c of rows 4 j to 4 j + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    b[c] = _mm512_shuffle_f32x4(a[c], a[c + 4], 0x88);           // lanes 0, 2 of rows 0-3, then of 4-7
    b[c + 4] = _mm512_shuffle_f32x4(a[c], a[c + 4], 0xDD);       // lanes 1, 3
    b[c + 8] = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0x88);
    b[c + 12] = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0xDD);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    put(c, _mm512_shuffle_f32x4(b[c], b[c + 8], 0x88));
    put(c + 4, _mm512_shuffle_f32x4(b[c + 4], b[c + 12], 0x88));
    put(c + 8, _mm512_shuffle_f32x4(b[c], b[c + 8], 0xDD));
    put(c + 12, _mm512_shuffle_f32x4(b[c + 4], b[c + 12], 0xDD));
  }
}

// Sums of two rows, rounded as from_float does, in dwords: the first row's in the low words.
template <class T>
inline Vector rounded_pairs(Vector even, Vector odd) {
  return _mm512_castsi512_ps(narrow_pairs<T>(narrowable<T>(even), narrowable<T>(odd)));
}

inline void turn(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  turn_rows([&](int i) __attribute__((always_inline)) { return _mm512_loadu_ps(from + i * from_stride); },
            [&](int i, __m512 column) __attribute__((always_inline)) { _mm512_storeu_ps(to + i * to_stride, column); });
}

// 4-bit groups come out as a permutation reads them from shifted registers: value j of lane i is nibble j of the i-th
// dword (fp32) or word (bf16), the low nibble of a byte being the odd element.
template <class Product, Codes codes>
constexpr int element_at(int position) {
  if (!four_bit(codes)) return position;
  const int lanes = kLanes * Product::kUnitElements;
  return kGroup / lanes * (position % lanes) + (position / lanes ^ 1);
}

// 128 bf16 as floats in that order: dword i of four vectors holds elements 8 i + 2 q and, above, 8 i + 2 q + 1.
inline void order_words(const BFloat16* x, float* out) {
  const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + 32), c = _mm512_loadu_si512(x + 64), d = _mm512_loadu_si512(x + 96);
  const __m512i fourth = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const __m512i index = _mm512_add_epi32(fourth, _mm512_set1_epi32(q));
    const __m512i low = _mm512_permutex2var_epi32(a, index, b), high = _mm512_permutex2var_epi32(c, index, d);
    const __m512i pairs = _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1);
    _mm512_storeu_si512(out + 32 * q, _mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xFFFF0000))));
    _mm512_storeu_si512(out + 32 * q + 16, _mm512_slli_epi32(pairs, 16));
  }
}

// 128 elements as floats in that order: one round moves the bottom bit of a position's seven to the top.
template <class T>
inline void order_words(const T* x, float* out) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
  __m512 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = load_floats(x + 16 * i);
#pragma GCC unroll 3
  for (int round = 0; round < 3; ++round) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      b[i] = _mm512_permutex2var_ps(a[2 * i], even, a[2 * i + 1]);
      b[i + 4] = _mm512_permutex2var_ps(a[2 * i], odd, a[2 * i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = b[i];
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) _mm512_storeu_ps(out + 16 * (i ^ 1), a[i]);
}

// fp8 codes of 16 elements as fp32 values / 256: e4m3 bits moved to fp16 mean that, subnormals included.
inline __m512 fp8_values(__m128i bytes) {
  const __m256i wide = _mm256_cvtepi8_epi16(bytes);  // the sign fills the upper byte
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7F));
  __m256i half = _mm256_or_si256(_mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0x8000))), _mm256_slli_epi16(magnitude, 7));
  half = _mm256_mask_mov_epi16(half, _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F)), _mm256_set1_epi16(0x7E00));
  return _mm512_cvtph_ps(half);
}

template <class Product, Codes codes>
struct Decoder : ScalesOf<codes> {
  static constexpr int kCodeBytes = four_bit(codes) ? kGroup / 2 : kGroup;
  __m512 table;
  __m512i spread;  // fp32 lane -> index of its scale among those from the group's first on

  explicit Decoder(const RowLayout& l) {
    if constexpr (four_bit(codes)) {
      table = _mm512_loadu_ps(codebook(l.format));
      const __m512i step = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
      spread = _mm512_srl_epi32(step, _mm_cvtsi32_si128(__builtin_ctzll(uint64_t(l.block_size)) - 5));
    }
  }

  template <class Scales>
  Vector scale(const Scales& s, int64_t group) const {
    if constexpr (codes == Codes::kFourBit && Scales::kInPlace) {
      return _mm512_mask_mov_ps(_mm512_set1_ps(s.at(4 * group)), 0xFF00, _mm512_set1_ps(s.at(4 * group + 2)));
    } else if constexpr (four_bit(codes)) {
      const __m128i scales = _mm_loadu_si128(reinterpret_cast<const __m128i*>(s.from(4 * group)));
      return _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(_mm_castsi128_ps(scales)));
    } else {
      return _mm512_set1_ps(codes == Codes::kFP8 ? s.value * 256.0f : s.value);
    }
  }

  // Values before scaling; fp8: divided by 256 (scale() multiplies by it: both exact).
  [[gnu::always_inline]] void values(const uint8_t* c, __m512 v[8]) const {
    if constexpr (four_bit(codes)) {
      // vpermps looks at the low 4 bits of a lane only: no mask.
      const __m512i bytes = _mm512_loadu_si512(c);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) v[i] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4 * i), table);
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(c + 16 * i));
        if constexpr (codes == Codes::kInt8) v[i] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
        else v[i] = fp8_values(bytes);
      }
    }
  }

  // Of kLanes rows, for fill_turned: 64 bytes of a row's codes, of which `bytes` are there; unscaled values of a dword's elements; and the
  // scale of a row's element 32 * step.
  static constexpr int kDwordElements = four_bit(codes) ? 8 : 4;
  static __m512 code_dwords(const uint8_t* c, int64_t bytes) {
    if (bytes >= 64) return _mm512_loadu_ps(c);
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi8((uint64_t(1) << bytes) - 1, c));
  }
  [[gnu::always_inline]] void values_of_dwords(__m512 codes_of_rows, __m512 v[kDwordElements]) const {
    const __m512i dwords = _mm512_castps_si512(codes_of_rows);
#pragma GCC unroll 8
    for (int i = 0; i < kDwordElements; ++i) {
      if constexpr (four_bit(codes)) {
        v[i] = _mm512_permutexvar_ps(_mm512_srli_epi32(dwords, 4 * (i ^ 1)), table);
      } else if constexpr (codes == Codes::kInt8) {
        v[i] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(dwords, 24 - 8 * i), 24));
      } else {
        v[i] = fp8_values(_mm512_cvtepi32_epi8(_mm512_srli_epi32(dwords, 8 * i)));
      }
    }
  }
  template <class Scales>
  static float scale_at(const Scales& s, int64_t step) {
    if constexpr (four_bit(codes)) return s.at(step);
    else return codes == Codes::kFP8 ? s.value * 256.0f : s.value;
  }

  // kInOrder: the order of the elements themselves, not that of element_at, and kCount vectors at least. 4-bit codes take a shuffle more
  // for each vector.
  template <bool kInOrder = false, int kCount = 8, class Scales>
  [[gnu::always_inline]] void scaled(const uint8_t* c, const Scales& s, int64_t group, __m512 v[8]) const {
    if constexpr (kInOrder && four_bit(codes)) {
      const __m512i bytes = _mm512_loadu_si512(c), dword = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
      const __m512i nibble = _mm512_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24, 4, 0, 12, 8, 20, 16, 28, 24);
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        const __m512i codes_of_16 = _mm512_permutexvar_epi32(_mm512_add_epi32(dword, _mm512_set1_epi32(2 * i)), bytes);
        const __m512 value = _mm512_permutexvar_ps(_mm512_srlv_epi32(codes_of_16, nibble), table);
        v[i] = _mm512_mul_ps(value, _mm512_set1_ps(s.at(4 * group + (codes == Codes::kFourBit32 ? i / 2 : i / 4 * 2))));
      }
      return;
    }
    values(c, v);
    const Vector factor = scale(s, group);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) v[i] = _mm512_mul_ps(v[i], factor);
  }
};

}  // namespace
}  // namespace halfbyte::cpu
