// Vectors and decoders of `linear` for AVX2. Included once per ISA.
#pragma once

#include <immintrin.h>

#include "linear_products.h"
#include "linear_scales.h"

namespace halfbyte::cpu {
namespace {

constexpr int kLanes = 8;
constexpr int kGroup = 64;
constexpr int kTileVectors = 2;  // the micro-kernel holds 6 x 2 sums, 2 vectors and 1 broadcast in 16 registers
constexpr bool kFetchPanels = false;

using Vector = __m256;

struct Float32 {
  static constexpr Compute kCompute = Compute::kFloat32;
  static constexpr bool kBFloat16By4Bit = false;
  static constexpr int kDirectTokens = 4;
  static constexpr TurnedFrom kTurnedFrom{64, 3, 0, TurnedFrom::kNever};
  static constexpr int kVectors = 8;
  static constexpr int kUnitElements = 1;
  using Element = float;
  using Values = __m256;
  using Sum = Vector;
  static Sum load_sums(const float* p) { return _mm256_loadu_ps(p); }
  static void store_sums(float* p, Sum v) { _mm256_storeu_ps(p, v); }
  static Values load(const float* p) { return _mm256_loadu_ps(p); }
  static Values broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static Vector multiply_add(Values a, Values b, Vector sum) { return _mm256_fmadd_ps(a, b, sum); }
};

inline Vector zero_vector() { return _mm256_setzero_ps(); }
inline void store_values(float* p, Vector v) { _mm256_storeu_ps(p, v); }
inline Vector join_lower_halves(Vector a, Vector b) { return _mm256_permute2f128_ps(a, b, 0x20); }
inline Vector keep_lanes(Vector v, uint32_t bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(int32_t(bits)), lane);
  return _mm256_and_ps(v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)));
}
inline float horizontal_sum(Vector v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// A block of kLanes x kLanes units, transposed: put(i, column i) of rows row(0) to row(7).
template <class Row, class Put>
[[gnu::always_inline]] inline void turn_rows(const Row& row, const Put& put) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = row(i);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    put(i, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    put(i + 4, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}

inline void turn(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  turn_rows([&](int i) __attribute__((always_inline)) { return _mm256_loadu_ps(from + i * from_stride); },
            [&](int i, __m256 column) __attribute__((always_inline)) { _mm256_storeu_ps(to + i * to_stride, column); });
}

// Sums of two rows, rounded as from_float does, in dwords: the first row's in the low words.
template <class T>
inline Vector rounded_pairs(Vector even, Vector odd) {
  return _mm256_castsi256_ps(narrow_pairs<T>(narrowable<T>(even), narrowable<T>(odd)));
}

// 4-bit groups come out as 4 vectors of even elements, then 4 of odd ones; inside, as byte unpacking leaves them.
template <class Product, Codes codes>
constexpr int element_at(int position) {
  if (!four_bit(codes)) return position;
  const int vector = position / 8, half = position / 4 % 2, i = position % 4;
  return 2 * (16 * half + 4 * (vector % 4) + i) + vector / 4;
}

template <class Product, Codes codes>
struct Decoder : ScalesOf<codes> {
  using DirectScales = typename ScalesOf<codes>::PanelScales;  // of one row at a time: a copy takes as long as a group or two
  static constexpr int kCodeBytes = four_bit(codes) ? kGroup / 2 : kGroup;
  // The codebook's fp32 values split into 4 byte planes: 16-entry byte lookups are one instruction for 32 codes, and
  // unpacking puts the bytes together again. 24 shuffles for 64 exact values; vpermps would take 64 and 8 blends.
  __m256i plane[4];

  explicit Decoder(const RowLayout& l) {
    if constexpr (four_bit(codes)) {
      uint8_t bytes[4][16];
      for (int c = 0; c < 16; ++c) {
        const uint32_t bits = float_bits(codebook(l.format)[c]);
        for (int p = 0; p < 4; ++p) bytes[p][c] = uint8_t(bits >> (8 * p));
      }
      for (int p = 0; p < 4; ++p)
        plane[p] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes[p])));
    }
  }

  template <class Scales>
  Vector scale(const Scales& s, int64_t group) const {
    if constexpr (codes == Codes::kFourBit32) {
      const __m256i spread = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);  // 32-element step of a lane -> index of its scale
      const __m128i scales = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(s.from(2 * group)));
      return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_castsi128_ps(scales)), spread);
    } else if constexpr (codes == Codes::kFourBit) {
      return _mm256_set1_ps(s.at(2 * group));  // no shuffle: those are what binds
    } else {
      return _mm256_set1_ps(codes == Codes::kFP8 ? s.value * 256.0f : s.value);
    }
  }

  void half(__m256i nibbles, Vector v[4]) const {
    const __m256i a = _mm256_shuffle_epi8(plane[0], nibbles), b = _mm256_shuffle_epi8(plane[1], nibbles);
    const __m256i c = _mm256_shuffle_epi8(plane[2], nibbles), d = _mm256_shuffle_epi8(plane[3], nibbles);
    const __m256i ab_low = _mm256_unpacklo_epi8(a, b), ab_high = _mm256_unpackhi_epi8(a, b);
    const __m256i cd_low = _mm256_unpacklo_epi8(c, d), cd_high = _mm256_unpackhi_epi8(c, d);
    v[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(ab_low, cd_low));
    v[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(ab_low, cd_low));
    v[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(ab_high, cd_high));
    v[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(ab_high, cd_high));
  }

  // Values before scaling; fp8: divided by 256 (scale() multiplies by it: both exact).
  [[gnu::always_inline]] void values(const uint8_t* c, Vector v[8]) const {
    if constexpr (four_bit(codes)) {
      const __m256i mask = _mm256_set1_epi8(15);
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c));
      half(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask), v);
      half(_mm256_and_si256(bytes, mask), v + 4);
    } else if constexpr (codes == Codes::kInt8) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i)
        v[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(c + 8 * i))));
    } else {
      // e4m3 bits moved to fp16 mean value / 256, subnormals included; 0x7F is NaN there and must be here. By halves of the words:
      // all but the lowest bit of the magnitude lie in the high one.
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c + 32 * i));
        const __m256i bytes = _mm256_permute4x64_epi64(loaded, 0xD8);  // unpacking is by lanes
        const __m256i sign = _mm256_set1_epi8(char(0x80));
        const __m256i magnitude = _mm256_andnot_si256(sign, bytes);
        const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi8(magnitude, _mm256_set1_epi8(0x7F)), _mm256_set1_epi8(0x7E));
        const __m256i half = _mm256_and_si256(_mm256_srli_epi16(bytes, 1), _mm256_set1_epi8(0x3F));
        const __m256i high = _mm256_or_si256(_mm256_or_si256(_mm256_and_si256(bytes, sign), half), nan);
        const __m256i low = _mm256_and_si256(_mm256_slli_epi16(bytes, 7), sign);
        const __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
        v[4 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(a));
        v[4 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
        v[4 * i + 2] = _mm256_cvtph_ps(_mm256_castsi256_si128(b));
        v[4 * i + 3] = _mm256_cvtph_ps(_mm256_extracti128_si256(b, 1));
      }
    }
  }

  // 4-bit codes: 2 shuffles more put the nibbles of 32 elements where unpacking leaves them in order.
  template <int kCount>
  [[gnu::always_inline]] void values_in_order(const uint8_t* c, Vector v[kCount]) const {
    const __m256i places = _mm256_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13,  //
                                            2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15);
#pragma GCC unroll 2
    for (int i = 0; i < kCount / 4; ++i) {
      const __m128i codes16 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(c + 16 * i));
      const __m256i twice = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(codes16), places);
      half(_mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(twice, 4), _mm256_set1_epi16(0x000F)),
                           _mm256_and_si256(twice, _mm256_set1_epi16(0x0F00))),
           v + 4 * i);
    }
  }

  // kInOrder: the order of the elements themselves, not that of element_at, and kCount vectors at least.
  template <bool kInOrder = false, int kCount = 8, class Scales>
  [[gnu::always_inline]] void scaled(const uint8_t* c, const Scales& s, int64_t group, Vector v[8]) const {
    if constexpr (kInOrder && four_bit(codes)) {
      values_in_order<kCount>(c, v);
      const Vector first = _mm256_set1_ps(s.at(2 * group));
      const Vector second = codes == Codes::kFourBit32 && kCount > 4 ? _mm256_set1_ps(s.at(2 * group + 1)) : first;
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) v[i] = _mm256_mul_ps(v[i], i < 4 ? first : second);
      return;
    }
    values(c, v);
    const Vector factor = scale(s, group);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) v[i] = _mm256_mul_ps(v[i], factor);
  }
};

}  // namespace
}  // namespace halfbyte::cpu
