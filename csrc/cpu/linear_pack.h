// Activations in the order in which the decoders of this ISA give weights. Included once per ISA, after linear_decode_*.h.
#pragma once

#include <type_traits>

#include "linear_kernels.h"
#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

inline int64_t padded_features(const RowLayout& l) { return round_up(l.in_features, kGroup); }

// One element of a unit.
template <class Product>
struct UnitElement {
  using Type = float;
};
#if defined(__AVX512BF16__)
template <>
struct UnitElement<BFloat16Pairs> {
  using Type = BFloat16;
};
#endif

inline void convert(float& to, float from) { to = from; }
inline void convert(float& to, BFloat16 from) { to = to_float(from); }
inline void convert(float& to, Float16 from) { to = to_float(from); }
inline void convert(BFloat16& to, BFloat16 from) { to = from; }
inline void convert(BFloat16& to, float from) { to = from_float<BFloat16>(from); }
inline void convert(BFloat16& to, Float16 from) { to = from_float<BFloat16>(to_float(from)); }

template <class Product, Codes codes>
struct Order {
  uint8_t element[kGroup];
  constexpr Order() : element() {
    for (int i = 0; i < kGroup; ++i) element[i] = uint8_t(element_at<Product, codes>(i));
  }
  constexpr bool natural() const {
    for (int i = 0; i < kGroup; ++i)
      if (element[i] != i) return false;
    return true;
  }
};

// Elements [0, kGroup) of x in decode order; those from `count` on are zeros.
template <class Product, Codes codes, class T>
inline void order_group(const T* x, int64_t count, typename UnitElement<Product>::Type* out) {
  static constexpr Order<Product, codes> order;
  if (count >= kGroup) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<Product, BFloat16Pairs> && std::is_same_v<T, BFloat16> && four_bit(codes)) {
      order_words(x, out);
      return;
    }
#endif
    if constexpr (order.natural()) {  // a loop of its own: becomes vectors
      for (int i = 0; i < kGroup; ++i) convert(out[i], x[i]);
    } else {
      for (int i = 0; i < kGroup; ++i) convert(out[i], x[order.element[i]]);
    }
  } else {
    for (int i = 0; i < kGroup; ++i) {
      if (order.element[i] < count) convert(out[i], x[order.element[i]]);
      else convert(out[i], 0.0f);
    }
  }
}

// (tokens, K) -> (groups, tokens, group) in decode order, the last group filled up with zeros.
template <class Product, Codes codes, class T>
void pack_direct(const T* input, int64_t tokens, const RowLayout& l, void* units) {
  auto* out = static_cast<typename UnitElement<Product>::Type*>(units);
  const int64_t K = l.in_features;
  for (int64_t start = 0; start < K; start += kGroup)
    for (int64_t m = 0; m < tokens; ++m, out += kGroup) order_group<Product, codes>(input + m * K + start, K - start, out);
}

// Tiles of tokens: as many vectors as the micro-kernel can hold, fewer at the end.
constexpr int tile_vectors(int64_t tokens_left) {
  if (kTileVectors == 4 && tokens_left > 3 * kLanes) return 4;
  return tokens_left > kLanes ? 2 : 1;
}

inline int64_t tile_start(int64_t tile) { return tile * kTileVectors * kLanes; }

// (tokens, K) -> for each tile (padded K in units, tokens of the tile), in decode order. Tiles are counted in full ones; the
// last may be split into narrower ones.
template <class Product, Codes codes, class T>
void pack_tiled(const T* input, int64_t tokens, const RowLayout& l, int64_t tile_begin, int64_t tile_end, void* units) {
  using E = typename UnitElement<Product>::Type;
  constexpr int kGroupUnits = kGroup / Product::kUnitElements;
  constexpr int kOrderedStride = kGroupUnits + 16;  // the tokens of a unit would share L1 sets
  const int64_t K = l.in_features, padded = padded_features(l);
  const int64_t end = tile_start(tile_end) < tokens ? tile_start(tile_end) : tokens;
  alignas(64) float ordered[kLanes * kOrderedStride];
  for (int64_t m0 = tile_start(tile_begin); m0 < end;) {
    const int width = tile_vectors(tokens - m0) * kLanes;
    float* tile = static_cast<float*>(units) + m0 * padded / Product::kUnitElements;
    for (int64_t start = 0; start < K; start += kGroup, tile += kGroupUnits * width) {
      for (int m = 0; m < width; m += kLanes) {
        for (int i = 0; i < kLanes; ++i) {
          float* row = ordered + i * kOrderedStride;
          if (m0 + m + i < tokens) order_group<Product, codes>(input + (m0 + m + i) * K + start, K - start, reinterpret_cast<E*>(row));
          else memset(row, 0, kGroupUnits * sizeof(float));
        }
        for (int u = 0; u < kGroupUnits; u += kLanes) turn(ordered + u, kOrderedStride, tile + u * width + m, width);
      }
    }
    m0 += width;
  }
}

// (tokens, rows) -> (tokens, rows rounded up to whole units), order kept.
template <class Product, class T>
void pack_grad(const T* grad, int64_t tokens, int64_t rows, void* units) {
  using E = typename UnitElement<Product>::Type;
  E* out = static_cast<E*>(units);
  for (int64_t m = 0; m < tokens; ++m, grad += rows) {
    for (int64_t n = 0; n < rows; ++n) convert(*out++, grad[n]);
    if (rows % Product::kUnitElements) convert(*out++, 0.0f);
  }
}

// (rows, columns) * factor -> elements [offset, offset + columns) of (rows, stride) units, order kept.
template <class Product, class T>
void pack_low_rank(const T* matrix, int64_t rows, int64_t columns, float factor, int64_t offset, int64_t stride, void* units) {
  using E = typename UnitElement<Product>::Type;
  E* out = static_cast<E*>(units) + offset;
  for (int64_t r = 0; r < rows; ++r, matrix += columns, out += stride * Product::kUnitElements)
    for (int64_t c = 0; c < columns; ++c) convert(out[c], to_float(matrix[c]) * factor);
}

// (tokens, rank) * factor -> for each tile (rank in units, tokens of the tile), order kept; zeros where there is none.
template <class Product, class T>
void pack_low_rank_tiled(const T* matrix, int64_t tokens, int64_t rank, float factor, void* units) {
  using E = typename UnitElement<Product>::Type;
  constexpr int kElements = Product::kUnitElements;
  const int64_t padded = round_up(rank, kElements);
  E* out = static_cast<E*>(units);
  for (int64_t m0 = 0; m0 < tokens;) {
    const int width = tile_vectors(tokens - m0) * kLanes;
    for (int64_t u = 0; u < padded; u += kElements) {
      for (int m = 0; m < width; ++m) {
        for (int e = 0; e < kElements; ++e, ++out) {
          if (m0 + m < tokens && u + e < rank) convert(*out, to_float(matrix[(m0 + m) * rank + u + e]) * factor);
          else convert(*out, 0.0f);
        }
      }
    }
    m0 += width;
  }
}

}  // namespace
}  // namespace halfbyte::cpu
