// Vectors and decoders of `linear` in plain C++ (4 lanes: what every x86-64 and arm64 has). Included once per ISA.
#pragma once

#include "linear_products.h"
#include "linear_scales.h"

namespace halfbyte::cpu {
namespace {

constexpr int kLanes = 4;
constexpr int kGroup = 32;
constexpr int kTileVectors = 2;  // the micro-kernel holds 6 x 2 sums, 2 vectors and 1 broadcast in 16 registers
constexpr bool kFetchPanels = false;

typedef float Vector __attribute__((vector_size(16)));

struct Float32 {
  static constexpr Compute kCompute = Compute::kFloat32;
  static constexpr bool kBFloat16By4Bit = false;
  static constexpr int kDirectTokens = 4;
  static constexpr TurnedFrom kTurnedFrom{64, 3, 0, TurnedFrom::kNever};
  static constexpr int kVectors = 8;
  static constexpr int kUnitElements = 1;
  using Element = float;
  using Values = Vector;
  using Sum = Vector;
  static Sum load_sums(const float* p) { return load(p); }
  static void store_sums(float* p, Sum v) { memcpy(p, &v, sizeof v); }
  static Values load(const float* p) {
    Vector v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static Values broadcast(const float* p) { return Vector{*p, *p, *p, *p}; }
  static Vector multiply_add(Values a, Values b, Vector sum) { return a * b + sum; }
};

template <class T>
inline Vector load_floats(const T* x) {
  return Vector{to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3])};
}
// 8 floats, rounded as from_float does.
template <class T>
inline void store_rounded(T* out, Vector low, Vector high) {
  for (int i = 0; i < 4; ++i) {
    out[i] = from_float<T>(low[i]);
    out[4 + i] = from_float<T>(high[i]);
  }
}
inline Vector zero_vector() { return Vector{}; }
inline void store_values(float* p, Vector v) { memcpy(p, &v, sizeof v); }
inline Vector keep_lanes(Vector v, uint32_t bits) {
  return Vector{bits & 1 ? v[0] : 0, bits & 2 ? v[1] : 0, bits & 4 ? v[2] : 0, bits & 8 ? v[3] : 0};
}
inline float horizontal_sum(Vector v) { return (v[0] + v[1]) + (v[2] + v[3]); }

// A block of kLanes x kLanes units, transposed: put(i, column i) of rows row(0) to row(3).
template <class Row, class Put>
inline void turn_rows(const Row& row, const Put& put) {
  const Vector rows[kLanes] = {row(0), row(1), row(2), row(3)};
  for (int i = 0; i < kLanes; ++i) put(i, Vector{rows[0][i], rows[1][i], rows[2][i], rows[3][i]});
}

inline void turn(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  turn_rows([&](int i) { return Float32::load(from + i * from_stride); },
            [&](int i, Vector column) { store_values(to + i * to_stride, column); });
}

// Sums of two rows, rounded as from_float does, in units of two: the first row's come first.
template <class T>
inline Vector rounded_pairs(Vector even, Vector odd) {
  T pairs[2 * kLanes];
  for (int i = 0; i < kLanes; ++i) {
    pairs[2 * i] = from_float<T>(even[i]);
    pairs[2 * i + 1] = from_float<T>(odd[i]);
  }
  return Float32::load(reinterpret_cast<const float*>(pairs));
}

// Position in the decode order -> element of the group.
template <class Product, Codes codes>
constexpr int element_at(int position) {
  return position;
}

template <class Product, Codes codes>
struct Decoder : ScalesOf<codes> {
  static constexpr int kCodeBytes = four_bit(codes) ? kGroup / 2 : kGroup;
  const float* table;

  explicit Decoder(const RowLayout& l) : table(codebook(l.format)) {}

  template <class Scales>
  static Vector scale(const Scales& s, int64_t group) {
    float value;
    if constexpr (four_bit(codes)) value = s.at(group);
    else value = s.value;
    return Vector{value, value, value, value};
  }

  // Values before scaling.
  [[gnu::always_inline]] void values(const uint8_t* c, Vector v[8]) const {
    for (int i = 0; i < kGroup; ++i) {
      if constexpr (four_bit(codes)) v[i / 4][i % 4] = table[i % 2 ? c[i / 2] & 15 : c[i / 2] >> 4];
      else if constexpr (codes == Codes::kInt8) v[i / 4][i % 4] = float(int8_t(c[i]));
      else v[i / 4][i % 4] = fp8_to_float(c[i]);
    }
  }

  // kInOrder: the order of the elements themselves, not that of element_at, and kCount vectors at least.
  template <bool kInOrder = false, int kCount = 8, class Scales>
  [[gnu::always_inline]] void scaled(const uint8_t* c, const Scales& s, int64_t group, Vector v[8]) const {
    values(c, v);
    const Vector factor = scale(s, group);
    for (int i = 0; i < 8; ++i) v[i] = v[i] * factor;
  }
};

}  // namespace
}  // namespace halfbyte::cpu
