// linear's backward: gradients broadcast, or in AMX's tiles, times the columns of a decoded panel. Included once per ISA.
#pragma once

#include "linear_tiled.h"

namespace halfbyte::cpu {
namespace {

// Columns of one micro-kernel; panels are stored subtile by subtile.
template <class Product>
constexpr int64_t kSubtile = kOnTiles<Product> ? kLanes : kTileVectors * kLanes;

// A panel of decoded weights, columns x units of N, in L2, and the sums of its columns.
struct BackwardShape {
  int64_t columns, units;
  template <class Product>
  constexpr int64_t subtile_stride() const {
    return (units + 1) * kSubtile<Product>;  // 1 more: a row's columns would share an L1 set
  }
  constexpr int64_t panel_floats() const { return (units + 1) * columns; }
  constexpr int64_t sums_stride() const { return columns + 16; }
};
constexpr BackwardShape kBackwardMany{256, 128};
// With few tokens reading the weight counts, and 256 columns of a row are 2 cache lines in a page of their own.
constexpr BackwardShape kBackwardFew{1024, 32};

template <class Product>
inline void backward_vectors(int64_t tokens, const float* a, int64_t a_stride, const float* b, float* sums,
                             int64_t sums_stride, int64_t units, bool first) {
  constexpr int G = kTileVectors;
  for (; tokens >= 6; tokens -= 6, a += 6 * a_stride, sums += 6 * sums_stride)
    tile<Product, 6, G>(a, a_stride, b, sums, sums_stride, units, first);
  switch (tokens) {
    case 5: tile<Product, 5, G>(a, a_stride, b, sums, sums_stride, units, first); break;
    case 4: tile<Product, 4, G>(a, a_stride, b, sums, sums_stride, units, first); break;
    case 3: tile<Product, 3, G>(a, a_stride, b, sums, sums_stride, units, first); break;
    case 2: tile<Product, 2, G>(a, a_stride, b, sums, sums_stride, units, first); break;
    case 1: tile<Product, 1, G>(a, a_stride, b, sums, sums_stride, units, first); break;
    default: break;
  }
}

// Where the sum of token m and column c lies.
template <class Product>
inline int64_t backward_sum_at(const BackwardShape& shape, int64_t m, int64_t c) {
#if defined(HALFBYTE_TILES)
  if constexpr (kOnTiles<Product>)
    return m / kTileSide * kTileSide * shape.columns + c / kTileSide * kTileUnits + m % kTileSide * kTileSide + c % kTileSide;
#endif
  return m * shape.sums_stride() + c;
}

// sums (tokens, columns) += grads (tokens, units [first_unit, + count) of all_units) times a panel (count, columns).
template <class Product>
inline void backward_product(const float* grads, [[maybe_unused]] int64_t grad_stride, int64_t tokens,
                             [[maybe_unused]] int64_t all_units, int64_t first_unit, int64_t count, const float* panel, int64_t columns, const BackwardShape& shape, float* sums, bool first) {
#if defined(HALFBYTE_TILES)
  if constexpr (kOnTiles<Product>) {
    constexpr int64_t kRun = kPanelUnits<Product>;  // units whose tiles lie together
    const int64_t strips = strips_of(tokens), run = first_unit / kRun * kRun, columns_of_tiles = columns / kTileSide;
    const TileOperand a = whole_tiles(grads + tile_at<Product>(all_units, strips, 0, first_unit),
                                      (kRun < all_units - run ? kRun : all_units - run) * kTileSide);
    const TileOperand b = whole_tiles(panel, shape.subtile_stride<Product>());
    TileFetch fetch{a.data, 0};
    if (tokens > kFewTokens && first_unit + count < all_units) {  // the next units' gradients, which are in L3
      fetch.lines = (4 * kTileSide + columns_of_tiles - 1) / columns_of_tiles;
      fetch.run = a.at(strips);
    }
    tile_product<false, true>(strips, columns_of_tiles, a, b, sums, shape.columns * kTileSide, count / kTileSide, first, fetch);
    return;
  }
#endif
  for (int64_t c = 0; c < columns; c += kSubtile<Product>)
    backward_vectors<Product>(tokens, grads + first_unit, grad_stride, panel + c / kSubtile<Product> * shape.subtile_stride<Product>(),
                              sums + c, shape.sums_stride(), count, first);
}

// Panel unit u and column c lie at subtile c / kSubtile, then u, then c % kSubtile. row(n, out) writes `columns` elements of
// row n in decode order.
template <class Product, class Row>
inline void fill_panel(int64_t rows, int64_t n0, int64_t units, int64_t columns, const BackwardShape& shape, float* panel,
                       const Row& row) {
  constexpr int kElements = Product::kUnitElements;
  alignas(64) float decoded[kElements][kBackwardFew.columns / kElements];
  for (int64_t u = 0; u < units; ++u) {
    for (int e = 0; e < kElements; ++e) {
      const int64_t n = n0 + u * kElements + e;
      if (n < rows) row(n, decoded[e]);
      else memset(decoded[e], 0, sizeof decoded[e]);
    }
    for (int64_t c = 0; c < columns; c += 8 * kLanes) {
      typename Product::Values v[8];
      if constexpr (kElements == 2) {
        typename Product::Values even[4], odd[4];
        for (int i = 0; i < 4; ++i) {
          even[i] = Product::load(decoded[0] + c / 2 + i * kLanes);
          odd[i] = Product::load(decoded[1] + c / 2 + i * kLanes);
        }
        interleave(even, odd, v);
      } else {
        for (int i = 0; i < 8; ++i) v[i] = Product::load(decoded[0] + c + i * kLanes);
      }
      for (int i = 0; i < 8; ++i) {
        const int64_t column = c + i * kLanes;
        constexpr int64_t kWide = kSubtile<Product>;
        store_values(panel + column / kWide * shape.subtile_stride<Product>() + u * kWide + column % kWide, v[i]);
      }
    }
  }
}

template <class Product, Codes codes>
void backward(const uint8_t* packed, int64_t rows, int64_t group_begin, int64_t group_end, const RowLayout& l, const void* grad,
              int64_t grad_stride, int64_t tokens, const LowRank* low_rank, const LinearOutput& output, void* scratch) {
  constexpr int kElements = Product::kUnitElements;
  constexpr int64_t kGroupUnits = kGroup / kElements;
  static constexpr Order<Product, codes> order;
  const Decoder<Product, codes> decoder(l);
  const BackwardShape shape = tokens <= kFewTokens ? kBackwardFew : kBackwardMany;
  const int64_t column_groups = shape.columns / kGroup;
#if defined(HALFBYTE_TILES)
  const TileScope scope;
#endif
  float* panel = static_cast<float*>(scratch);
  float* sums = panel + shape.panel_floats();
  for (int64_t g0 = group_begin; g0 < group_end; g0 += column_groups) {
    const int64_t groups = g0 + column_groups < group_end ? column_groups : group_end - g0;
    bool first = true;
    // sums (+)= grads (tokens, reduced rows) @ rows (reduced, columns)
    const auto accumulate = [&](int64_t reduced_rows, const void* grads, int64_t stride, const auto& row) {
      const int64_t reduced = round_up((reduced_rows + kElements - 1) / kElements, kUnitMultiple<Product>);
      for (int64_t u0 = 0; u0 < reduced; u0 += shape.units, first = false) {
        const int64_t units = u0 + shape.units < reduced ? shape.units : reduced - u0;
        fill_panel<Product>(reduced_rows, u0 * kElements, units, groups * kGroup, shape, panel, row);
        backward_product<Product>(static_cast<const float*>(grads), stride, tokens, reduced, u0, units, panel, groups * kGroup, shape,
                                  sums, first);
      }
    };
    accumulate(rows, grad, grad_stride, [&](int64_t n, float* out) {
      const uint8_t* row = packed + n * l.row_bytes;
      const uint8_t* next = row + kRowsAhead * l.row_bytes + g0 * Decoder<Product, codes>::kCodeBytes;
      decode_row<Product, codes>(decoder, row, l, g0, groups, out, nullptr, next);
    });
    if (low_rank) {
      accumulate(low_rank->rank, low_rank->input, low_rank->stride, [&](int64_t n, float* out) {
        const float* source = static_cast<const float*>(low_rank->weight) + (g0 * low_rank->rank + n) * kGroupUnits;
        for (int64_t g = 0; g < groups; ++g, source += low_rank->rank * kGroupUnits, out += kGroupUnits)
          memcpy(out, source, kGroupUnits * sizeof(float));
      });
    }
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t column = (g0 + g) * kGroup;
        const int64_t count = column + kGroup < l.in_features ? kGroup : l.in_features - column;
        float natural[kGroup];
        for (int i = 0; i < kGroup; ++i) natural[order.element[i]] = sums[backward_sum_at<Product>(shape, m, g * kGroup + i)];
        store_output(output, m, column, natural, count);
      }
    }
  }
}

}  // namespace
}  // namespace halfbyte::cpu
