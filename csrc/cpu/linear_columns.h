// Rows of a matrix (tokens, units), as they lie, broadcast, or in AMX's tiles, times the columns of panels of decoded weights: what
// linear's backward and its forward on turned weights share. Included once per ISA.
#pragma once

#include "linear_tiled.h"

namespace halfbyte::cpu {
namespace {

// A panel of decoded weights, columns x units that are summed over, in L2; beside it are the rows that meet it and the sums.
struct ColumnShape {
  int64_t columns, units;
  constexpr int64_t padded_units() const { return units | 1; }  // odd, or a row's columns would share an L1 set
  constexpr int64_t panel_floats() const { return padded_units() * columns; }
  constexpr int64_t sums_stride() const { return columns + 16; }
  constexpr int64_t scratch_floats(int64_t tokens) const { return panel_floats() + round_up(tokens, 16) * sums_stride(); }
};

template <class Product>
inline void column_vectors(int64_t tokens, const float* a, int64_t a_stride, const float* b, float* sums, int64_t sums_stride,
                           int64_t units, bool first, Ahead next) {
  constexpr int G = kTileVectors;
  for (; tokens >= 6; tokens -= 6, a += 6 * a_stride, sums += 6 * sums_stride, next = next.rows(6))
    tile<Product, 6, G>(a, a_stride, b, sums, sums_stride, units, first, next);
  switch (tokens) {
    case 5: tile<Product, 5, G>(a, a_stride, b, sums, sums_stride, units, first, next); break;
    case 4: tile<Product, 4, G>(a, a_stride, b, sums, sums_stride, units, first, next); break;
    case 3: tile<Product, 3, G>(a, a_stride, b, sums, sums_stride, units, first, next); break;
    case 2: tile<Product, 2, G>(a, a_stride, b, sums, sums_stride, units, first, next); break;
    case 1: tile<Product, 1, G>(a, a_stride, b, sums, sums_stride, units, first, next); break;
    default: break;
  }
}

// How rows (tokens, units) meet a panel, which is stored by runs of kRun columns, unit after unit: broadcast, token after token, from
// where they lie in their matrix.
template <class Product>
struct ColumnLayout {
  struct Rows {
    const float* data;
    int64_t stride;
    Ahead next;  // those that are next, which come from L3
  };
  // The backward's. Every panel loads and stores all sums, one of many units the least often, and every pass over the rows finds their
  // scales and reads the gradients anew; K = 576 takes one of pairs. (Of floats, twice as much, 256 columns fill L2.) With few tokens
  // reading the weight counts, and 256 columns of a row are 2 cache lines in a page of their own.
  static constexpr ColumnShape kMany{Product::kUnitElements == 2 ? 640 : 256, 512}, kFew{1024, 128};
  static constexpr int64_t kRun = kTileVectors * kLanes;  // columns of one micro-kernel
  static constexpr int64_t kTokensTogether = 1;
  // Tokens that meet all columns of a panel before the next ones do, a multiple of the micro-kernel's. L2 keeps their rows, the next ones
  // are fetched meanwhile, and sums that are complete are stored while they are in L1.
  static constexpr int64_t kStripTokens = 24;
  static constexpr bool kPlain = true;  // a prepared matrix is the matrix, in units

  // Units of a token that lie together from `unit` on, and where they are in a prepared matrix.
  static int64_t run_units(int64_t all_units, int64_t /*unit*/) { return all_units; }
  static int64_t unit_at(int64_t /*tokens*/, int64_t all_units, int64_t m, int64_t unit) { return m * all_units + unit; }

  // What meets the panel of units from `unit` on: tokens from m0 on. After them the next strip does, or the first one the next panel.
  static Rows rows(const ColumnShape& shape, const float* prepared, int64_t tokens, int64_t all_units, int64_t m0, int64_t unit) {
    const bool last = tokens - m0 <= kStripTokens;
    const int64_t next = last ? unit + shape.units : unit;
    Ahead ahead{};
    if (next < all_units)
      ahead = {reinterpret_cast<const uint8_t*>(prepared + (last ? 0 : m0 + kStripTokens) * all_units + next), 4 * all_units, 16};
    return {prepared + m0 * all_units + unit, all_units, ahead};
  }

  // Where the sum of token m and column c lies, those of kLanes columns together.
  static int64_t sum_at(const ColumnShape& shape, int64_t m, int64_t c) { return m * shape.sums_stride() + c; }

  // sums (tokens, columns) += a (tokens, count units) times a panel (count, columns). `target`: where they are stored next.
  static void multiply(const ColumnShape& shape, const Rows& a, int64_t tokens, int64_t count, const float* panel, int64_t columns,
                       float* sums, bool first, const Target& target) {
    Ahead next = a.next;
    for (int64_t c = 0; c < columns; c += kRun, next = {}) {
      target.fetch(c, c + kRun, columns);
      column_vectors<Product>(tokens, a.data, a.stride, panel + c * shape.padded_units(), sums + c, shape.sums_stride(), count, first,
                              next);
    }
  }
};

#if defined(HALFBYTE_TILES)
template <class Product>
  requires kOnTiles<Product>
struct ColumnLayout<Product> {
  static constexpr ColumnShape kMany{256, kTogether}, kFew{1024, 32};
  static constexpr int64_t kRun = kTileSide;
  static constexpr int64_t kTokensTogether = kTileSide;
  static constexpr int64_t kStripTokens = kLinearTokens;
  static constexpr bool kPlain = false;

  static int64_t run_units(int64_t /*all_units*/, int64_t /*unit*/) { return kTileSide; }
  static int64_t unit_at(int64_t tokens, int64_t all_units, int64_t m, int64_t unit) {
    return tile_at(all_units, strips_of(tokens), m / kTileSide, unit) + m % kTileSide * kTileSide;
  }

  static TileOperand rows(const ColumnShape& /*shape*/, const float* prepared, int64_t tokens, int64_t all_units, int64_t m0,
                          int64_t unit) {
    const int64_t left = all_units - unit / kTogether * kTogether, together = kTogether < left ? kTogether : left;
    return whole_tiles(prepared + unit_at(tokens, all_units, m0, unit), together * kTileSide);
  }

  static int64_t sum_at(const ColumnShape& shape, int64_t m, int64_t c) {
    return m / kTileSide * kTileSide * shape.columns + c / kTileSide * kTileUnits + m % kTileSide * kTileSide + c % kTileSide;
  }

  static void multiply(const ColumnShape& shape, const TileOperand& a, int64_t tokens, int64_t count, const float* panel,
                       int64_t columns, float* sums, bool first, const Target&) {
    const int64_t columns_of_tiles = columns / kTileSide;
    TileFetch fetch{a.data, 0};
    if (tokens > kFewTokens) {  // the next strips' rows, which are in L3; after the last ones the next units'
      fetch.lines = (4 * kTileSide + columns_of_tiles - 1) / columns_of_tiles;
      fetch.run = a.at(2);
    }
    tile_product<false>(strips_of(tokens), columns_of_tiles, a, whole_tiles(panel, kTileSide * shape.padded_units()), sums,
                        shape.columns * kTileSide, count / kTileSide, first, fetch);
  }
};
#endif

template <class Product>
constexpr int64_t units_of(int64_t elements) {
  return (elements + Product::kUnitElements - 1) / Product::kUnitElements;
}

// (tokens, columns) -> a prepared matrix of tokens [begin, end), zeros past the last column; `begin` is a multiple of kTokensTogether.
template <class Product, class T>
void pack_matrix(const T* matrix, int64_t tokens, int64_t columns, int64_t begin, int64_t end, void* units) {
  using L = ColumnLayout<Product>;
  using E = typename Product::Element;
  const int64_t all = round_up(units_of<Product>(columns), kUnitMultiple<Product>);
  for (int64_t m = begin; m < end; ++m) {
    const T* row = matrix + m * columns;
    for (int64_t u = 0, run; u < all; u += run) {
      run = L::run_units(all, u);
      E* out = reinterpret_cast<E*>(static_cast<float*>(units) + L::unit_at(tokens, all, m, u));
      const int64_t first = u * Product::kUnitElements, room = run * Product::kUnitElements;
      const int64_t given = columns - first < room ? columns - first : room;
      for (int64_t i = 0; i < given; ++i) convert(out[i], row[first + i]);
      for (int64_t i = given; i < room; ++i) convert(out[i], 0.0f);
    }
  }
}

// The sums of `tokens` tokens and `columns` columns, panel by panel, each multiplied by all tokens, strip after strip of them. In turn
// several matrices (tokens, units) may add to them.
template <class Product>
class ColumnSums {
  using L = ColumnLayout<Product>;

 public:
  ColumnSums(const ColumnShape& shape, int64_t tokens, int64_t columns, void* scratch)
      : shape_(shape), tokens_(tokens), columns_(columns), panel_(static_cast<float*>(scratch)), sums_(panel_ + shape.panel_floats()) {}

  // Adds rows (tokens, units), prepared, times what fill(first unit, units, panel) puts into the panel. `last`: no more is added.
  //   target(first token, tokens)          where they are stored next
  //   finish(first token, tokens, sums)    the sums of these tokens are complete, and still in L1 or L2
  template <class Fill, class TargetOf, class Finish>
  void add(const void* rows, int64_t units, bool last, const Fill& fill, const TargetOf& target, const Finish& finish) {
    const auto* prepared = static_cast<const float*>(rows);
    for (int64_t u0 = 0; u0 < units; u0 += shape_.units, first_ = false) {
      const int64_t count = u0 + shape_.units < units ? shape_.units : units - u0;
      const bool complete = last && u0 + count == units;
      fill(u0, count, panel_);
      for (int64_t m = 0, strip; m < tokens_; m += strip) {
        strip = L::kStripTokens < tokens_ - m ? L::kStripTokens : tokens_ - m;
        float* const sums = sums_ + (first_ && complete ? 0 : L::sum_at(shape_, m, 0));  // the first ones' place, if that is all
        L::multiply(shape_, L::rows(shape_, prepared, tokens_, units, m, u0), strip, count, panel_, columns_, sums, first_,
                    complete ? target(m, strip) : Target{});
        if (complete) finish(m, strip, sums);
      }
    }
  }

 private:
  const ColumnShape& shape_;
  const int64_t tokens_, columns_;
  float *const panel_, *const sums_;
  bool first_ = true;
};

}  // namespace
}  // namespace halfbyte::cpu
