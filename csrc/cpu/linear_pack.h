// Activations in the order in which the decoders of this ISA give weights. Included once per ISA, after linear_decode_*.h.
#pragma once

#include "linear_kernels.h"
#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

// Whether products run on AMX tiles (linear_amx.h). fp32 has no tile product.
template <class Product>
#if defined(HALFBYTE_TILES)
constexpr bool kOnTiles = Product::kUnitElements > 1;
#else
constexpr bool kOnTiles = false;
#endif

// Units of an operand of tiles that lie together: of K in a panel of decoded rows; of what is summed over in a matrix that meets panels of
// columns (linear_columns.h) all, if they are one pass, or so many that two strips leave L1 room.
constexpr int64_t kTogether = 128, kMatrixTogether = 320;
constexpr int64_t matrix_together(int64_t units) { return units <= kMatrixTogether ? units : 256; }

// Where unit `unit` of strip `strip` lies in an operand of tiles: 16 x 16 units each, contiguous, in the order strip by strip
// within `together` units, so that what meets a panel is one run of memory. (Strips of whole rows would lie 128 KiB apart at
// K = 4096, in the same sets of L2.) `units` is a multiple of 16.
inline int64_t tile_at(int64_t together, int64_t units, int64_t strips, int64_t strip, int64_t unit) {
  const int64_t first = unit / together * together, count = together < units - first ? together : units - first;
  return (first * strips + strip * count + unit - first) * kLanes;
}

inline int64_t strips_of(int64_t tokens) { return (tokens + kLanes - 1) / kLanes; }

// Units of a prepared row are padded with zeros to a multiple of this.
template <class Product>
constexpr int64_t kUnitMultiple = kOnTiles<Product> ? kLanes : 1;

// Units of a group that `direct` takes: all tokens side by side, one base address.
template <class Product>
constexpr int direct_units(int tokens) {
  return tokens * kGroup / Product::kUnitElements;
}

inline void convert(float& to, float from) { to = from; }
inline void convert(float& to, BFloat16 from) { to = to_float(from); }
inline void convert(float& to, Float16 from) { to = to_float(from); }
inline void convert(BFloat16& to, BFloat16 from) { to = from; }
inline void convert(BFloat16& to, float from) { to = from_float<BFloat16>(from); }
inline void convert(BFloat16& to, Float16 from) { to = from_float<BFloat16>(to_float(from)); }

// `count` elements of a row, each as an E. fp16 by vectors: no compiler makes any of its loop, which has branches.
template <class T, class E>
inline void convert_row(const T* x, int64_t count, E* out) {
  const int64_t whole = __is_same(T, Float16) ? count / kLanes * kLanes : 0;
  for (int64_t i = 0; i < whole; i += kLanes) {
    float values[kLanes];
    store_values(values, load_floats(x + i));
    for (int j = 0; j < kLanes; ++j) convert(out[i + j], values[j]);
  }
  for (int64_t i = whole; i < count; ++i) convert(out[i], x[i]);
}

// Which units of a decoded group hold its first half, if they can be told apart: the lower lanes of its vectors, or the first vectors.
enum class FirstHalf { kMixed, kLanes, kVectors };

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
  constexpr FirstHalf first_half() const {
    if (natural()) return FirstHalf::kVectors;
    for (int i = 0; i < kGroup; ++i)
      if ((i / Product::kUnitElements % kLanes < kLanes / 2) != (element[i] < kGroup / 2)) return FirstHalf::kMixed;
    return FirstHalf::kLanes;
  }
};

template <class Product, Codes codes>
constexpr FirstHalf kFirstHalf = Order<Product, codes>{}.first_half();

// Whether the last group of a row, no more than half full, takes half of a group's units in panels and tiles: K = 576 is 4.5 groups of
// 128, and multiplying 5 would take 11 % longer.
template <class Product, Codes codes>
inline bool ends_in_half(const RowLayout& l) {
  const int64_t rest = l.in_features % kGroup;
  return kFirstHalf<Product, codes> != FirstHalf::kMixed && rest != 0 && rest <= kGroup / 2;
}

// Elements of a prepared row or of a panel's: whole groups, but for such a half.
template <class Product, Codes codes>
inline int64_t padded_features(const RowLayout& l) {
  return round_up(l.in_features, kGroup) - (ends_in_half<Product, codes>(l) ? kGroup / 2 : 0);
}

// Elements [0, kGroup) of x in decode order; those from `count` on are zeros.
template <class Product, Codes codes, class T>
inline void order_group(const T* x, int64_t count, typename Product::Element* out) {
  static constexpr Order<Product, codes> order;
  T padded[kGroup];
  if (count < kGroup) {
    memset(padded, 0, sizeof padded);
    memcpy(padded, x, size_t(count) * sizeof(T));
    x = padded;
  }
  if constexpr (order.natural()) {
    convert_row(x, kGroup, out);
  } else if constexpr (requires { order_words(x, out); }) {  // has instructions for it
    order_words(x, out);
  } else {
    typename Product::Element values[kGroup];
    convert_row(x, kGroup, values);
    for (int i = 0; i < kGroup; ++i) out[i] = values[order.element[i]];
  }
}

// (tokens, K) -> (groups, tokens, group) in decode order, the last group filled up with zeros.
template <class Product, Codes codes, class T>
void pack_direct(const T* input, int64_t tokens, const RowLayout& l, void* units) {
  auto* out = static_cast<typename Product::Element*>(units);
  const int64_t K = l.in_features;
  for (int64_t start = 0; start < K; start += kGroup)
    for (int64_t m = 0; m < tokens; ++m, out += kGroup) order_group<Product, codes>(input + m * K + start, K - start, out);
}

// Tiles of tokens: two vectors, one at the end, or where AMX's tiles take them.
constexpr int64_t kTileTokens = 2 * kLanes;

template <class Product>
constexpr int tile_vectors(int64_t tokens_left) {
  return tokens_left > kLanes && !kOnTiles<Product> ? 2 : 1;
}

inline int64_t tile_start(int64_t tile) { return tile * kTileTokens; }

// Where unit `unit` of the tile of `width` tokens from m0 on lies: rows of `width` units, tile after tile.
template <class Product>
inline int64_t unit_at(int64_t units, int64_t tokens, int64_t m0, int64_t width, int64_t unit) {
  return kOnTiles<Product> ? tile_at(kTogether, units, strips_of(tokens), m0 / kLanes, unit) : m0 * units + unit * width;
}

// Where a unit is among those of a decoded group, by its element; `half`: of half a group, as decode_row leaves it.
template <class Product, Codes codes>
struct Places {
  uint8_t whole[kGroup], half[kGroup / 2];
  constexpr Places() : whole(), half() {
    for (int i = 0; i < kGroup; ++i) whole[element_at<Product, codes>(i)] = uint8_t(i);
    for (int e = 0; e < kGroup / 2; ++e)
      half[e] = kFirstHalf<Product, codes> == FirstHalf::kLanes ? uint8_t(whole[e] / kLanes * (kLanes / 2) + whole[e] % kLanes) : whole[e];
  }
};

// `count` units of kLanes tokens, `stride` elements apart, in the order of element_at, or of decode_row if they are half of a group: unit
// by unit, `width` units apart. Tokens from `tokens` on, and elements from `elements` on, are zeros.
template <class Product, Codes codes, class T>
  requires(Product::kUnitElements == 1)
inline void turn_group(const T* x, int64_t stride, int64_t tokens, int64_t elements, int64_t count, float* out, int64_t width) {
  static constexpr Places<Product, codes> places;
  const uint8_t* place = count < kGroup ? places.half : places.whole;
  for (int64_t first = 0; first < count; first += kLanes, x += kLanes, place += kLanes) {
    const int64_t given = elements - first;
    const auto row = [&](int i) __attribute__((always_inline)) {
      const T* p = x + i * stride;
      if (i >= tokens || given <= 0) return zero_vector();
      if (first % (64 / int64_t(sizeof(T))) == 0) prefetch(p + kGroup);  // too many rows for the CPU to see it
      if (given >= kLanes) return load_floats(p);
      T padded[kLanes] = {};
      memcpy(padded, p, size_t(given) * sizeof(T));
      return load_floats(padded);
    };
    turn_rows(row, [&](int i, Vector unit) __attribute__((always_inline)) { store_values(out + place[i] * width, unit); });
  }
}

// (tokens, K) -> for each tile (padded K in units, tokens of the tile), in decode order. Tiles are counted in full ones; the
// last may be split into narrower ones.
template <class Product, Codes codes, class T>
void pack_tiled(const T* input, int64_t tokens, const RowLayout& l, int64_t tile_begin, int64_t tile_end, void* units) {
  constexpr int kGroupUnits = kGroup / Product::kUnitElements;
  const int64_t K = l.in_features, all = padded_features<Product, codes>(l) / Product::kUnitElements;
  const int64_t end = tile_start(tile_end) < tokens ? tile_start(tile_end) : tokens;
  for (int64_t m0 = tile_start(tile_begin); m0 < end;) {
    const int width = tile_vectors<Product>(tokens - m0) * kLanes;
    for (int64_t start = 0; start < K; start += kGroup) {
      const int64_t first = start / Product::kUnitElements, count = first + kGroupUnits < all ? kGroupUnits : all - first;
      float* tile = static_cast<float*>(units) + unit_at<Product>(all, tokens, m0, width, first);
      for (int m = 0; m < width; m += kLanes)
        turn_group<Product, codes>(input + (m0 + m) * K + start, K, tokens - m0 - m, K - start, count, tile + m, width);
    }
    m0 += width;
  }
}

// (rows, columns) * factor -> elements [offset, offset + columns) of (rows, stride) units, order kept.
template <class Product, class T>
void pack_low_rank(const T* matrix, int64_t rows, int64_t columns, float factor, int64_t offset, int64_t stride, void* units) {
  using E = typename Product::Element;
  E* out = static_cast<E*>(units) + offset;
  for (int64_t r = 0; r < rows; ++r, matrix += columns, out += stride * Product::kUnitElements) {
    if (factor == 1.0f) {  // mostly a copy
      convert_row(matrix, columns, out);
      continue;
    }
    float values[kGroup];
    for (int64_t c = 0; c < columns; c += kGroup) {
      const int64_t count = kGroup < columns - c ? kGroup : columns - c;
      convert_row(matrix + c, count, values);
      for (int64_t i = 0; i < count; ++i) convert(out[c + i], values[i] * factor);
    }
  }
}

// (tokens, rank) * factor -> for each tile (rank in units, tokens of the tile), order kept; zeros where there is none.
template <class Product, class T>
void pack_low_rank_tiled(const T* matrix, int64_t tokens, int64_t rank, float factor, void* units) {
  using E = typename Product::Element;
  constexpr int kElements = Product::kUnitElements;
  const int64_t row_units = round_up((rank + kElements - 1) / kElements, kUnitMultiple<Product>);
  for (int64_t m0 = 0; m0 < tokens;) {
    const int width = tile_vectors<Product>(tokens - m0) * kLanes;
    for (int64_t u = 0; u < row_units; ++u) {
      E* out = reinterpret_cast<E*>(static_cast<float*>(units) + unit_at<Product>(row_units, tokens, m0, width, u));
      for (int m = 0; m < width; ++m) {
        for (int e = 0; e < kElements; ++e, ++out) {
          const int64_t r = u * kElements + e;
          if (m0 + m < tokens && r < rank) convert(*out, to_float(matrix[(m0 + m) * rank + r]) * factor);
          else convert(*out, 0.0f);
        }
      }
    }
    m0 += width;
  }
}

}  // namespace
}  // namespace halfbyte::cpu
