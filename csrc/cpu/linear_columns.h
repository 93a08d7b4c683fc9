// Rows of a matrix (tokens, units), as they lie, broadcast, or in AMX's tiles, times the columns of panels of decoded weights: what
// linear's backward and its forward on turned weights share. Included once per ISA.
#pragma once

#include "linear_tiled.h"

namespace halfbyte::cpu {
namespace {

// Xeons with AMX have 2 MiB of L2, and their prefetcher finds the rows of a matrix: asking for them takes more than it saves.
#if defined(HALFBYTE_TILES)
constexpr bool kLargeL2 = true;
#else
constexpr bool kLargeL2 = false;
#endif

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
                           int64_t units, bool first, const Ahead& next, const LinearOutput* output) {
  constexpr int G = kTileVectors;
  for (int64_t m = 0; m < tokens; m += 6) {
    const LinearOutput stored = output ? output->from(m, 0) : LinearOutput{};
    const auto rows = [&]<int R>() {
      tile<Product, R, G, true>(a + m * a_stride, a_stride, b, sums + m * sums_stride, sums_stride, units, first, next.rows(m),
                                output ? &stored : nullptr);
    };
    if (tokens - m >= 6) rows.template operator()<6>();
    else with_count<5>(tokens - m, rows);
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
  // scales and reads the gradients anew; K = 576 takes one of pairs. (Of floats, twice as much, 512 KiB: 256 columns, or in a large L2 128
  // by more units.) With few tokens reading the weight counts, and 256 columns of a row are 2 cache lines in a page of their own.
  static constexpr ColumnShape kMany{Product::kUnitElements == 2 ? 640 : kLargeL2 ? 128 : 256, kLargeL2 ? 1024 : 512}, kFew{1024, 128};
  // The forward's: pairs of a stretch are one pass, whose sums never leave registers.
  static constexpr int64_t kTurnedUnits = Product::kUnitElements == 2 ? kStretch / 2 : kLargeL2 ? 2048 : 1024;

  static constexpr int64_t kRun = kTileVectors * kLanes;  // columns of one micro-kernel
  // At most: a thread keeps the sums of kMostTokens tokens beside them. One run where L2 keeps all tokens of a narrow layer beside it: by
  // the next call a larger panel's memory is in L3, and decoding into it waits for that.
  static constexpr int64_t kTurnedColumns = kLargeL2 ? kRun : 640;
  static constexpr TurnedFrom kTurnedFrom = Product::kTurnedFrom;
  static constexpr int64_t kTokensTogether = 1;
  // Of a call. For twice as many, weights are decoded half as often, where L2 takes their sums.
  static constexpr int64_t kMostTokens = (kLargeL2 ? 2 : 1) * kLinearTokens;
  // Tokens that meet all columns of a panel before the next ones do, a multiple of the micro-kernel's. L2 keeps their rows, and the next
  // ones are fetched meanwhile.
  static constexpr int64_t kStripTokens = kLanes < 16 ? 48 : 24;
  static constexpr int32_t kPackedUnits = INT32_MAX;  // a prepared matrix is the matrix, in units

  // Units of a prepared matrix that no pass reaches beyond.
  static constexpr int64_t together(int64_t all_units) { return all_units; }
  // Units of a token that lie together from `unit` on, and where they are in a prepared matrix.
  static int64_t run_units(int64_t all_units, int64_t /*unit*/) { return all_units; }
  static int64_t unit_at(int64_t /*tokens*/, int64_t all_units, int64_t m, int64_t unit) { return m * all_units + unit; }

  // What meets the panel of units from `unit` on: tokens from m0 on. After them the next strip does, or the first one the next panel.
  static Rows rows(const ColumnShape& shape, const TokenUnits& matrix, int64_t tokens, int64_t all_units, int64_t m0, int64_t unit) {
    const auto* prepared = static_cast<const float*>(matrix.data);
    const bool last = tokens - m0 <= kStripTokens;
    const int64_t next = last ? unit + shape.units : unit;
    Ahead ahead{};
    if (!kLargeL2 && next < all_units)
      ahead = {reinterpret_cast<const uint8_t*>(prepared + (last ? 0 : m0 + kStripTokens) * all_units + next), 4 * all_units, 16};
    return {prepared + m0 * all_units + unit, all_units, ahead};
  }

  // Where the sum of token m and column c lies, those of kLanes columns together.
  static int64_t sum_at(const ColumnShape& shape, int64_t m, int64_t c) { return m * shape.sums_stride() + c; }

  // sums (tokens, columns) += a (tokens, count units) times a panel (count, columns in whole runs). `output`: the sums are complete then,
  // and leave for it from their registers, but for those of a last run that is not whole.
  static void multiply(const ColumnShape& shape, const Rows& a, int64_t tokens, int64_t count, const float* panel, int64_t columns,
                       float* sums, bool first, const LinearOutput* output) {
    Ahead next = a.next;
    for (int64_t c = 0; c < columns; c += kRun, next = {}) {
      const bool whole = output && c + kRun <= columns;
      const LinearOutput of_run = whole ? output->from(0, c) : LinearOutput{};
      column_vectors<Product>(tokens, a.data, a.stride, panel + c * shape.padded_units(), sums + c, shape.sums_stride(), count, first,
                              next, whole ? &of_run : nullptr);
    }
    if (const int64_t c = columns / kRun * kRun; output && c < columns)
      for (int64_t m = 0; m < tokens; ++m) store_output<Product>(*output, m, c, sums + sum_at(shape, m, c), columns - c);
  }
};

#if defined(HALFBYTE_TILES)
// Complete sums of `rows` tokens and COLUMNS tiles' columns, or `left` of them, strips of tokens COLUMNS tiles apart -> output.
template <class Product, class T, bool kBias, int COLUMNS>
inline void store_tile_sums(const float* block, int64_t rows, int64_t left, const T* bias, T* out, int64_t stride) {
  const bool whole = COLUMNS == 2 && left >= 2 * kTileSide;
  for (int64_t m = 0; m < rows; ++m, out += stride) {
    const float* at = block + m / kTileSide * COLUMNS * kTileUnits + m % kTileSide * kTileSide;
    const auto sums = [&](int j) __attribute__((always_inline)) { return Product::load_sums(at + j * kTileUnits); };
    if (whole && !kBias) {
      store_sums_rounded<Product>(out, sums(0), sums(1));
      continue;
    }
    float of_token[2 * kTileSide];
    for (int j = 0; j < COLUMNS; ++j) store_values(of_token + j * kTileSide, sums(j));
    store_values_of_row<Product, T, kBias>(of_token, left < COLUMNS * kTileSide ? left : COLUMNS * kTileSide, bias, out);
  }
}

// What `tile_product` does with complete sums of `tokens` tokens and `columns` columns; `output`: null, if they are none yet.
template <class Product>
struct StoreTiles {
  const LinearOutput* output;
  int64_t tokens, columns, element_bytes = output ? output->element_bytes() : 0, row_bytes = output ? output->stride * element_bytes : 0;

  const char* line(int64_t row, int64_t column) const {
    return static_cast<const char*>(output->data) + (row * row_bytes + column * element_bytes) * kTileSide;
  }
  template <int ROWS, int COLUMNS>
  void operator()(int64_t row, int64_t column, const float* block) const {
    const int64_t m0 = row * kTileSide, c0 = column * kTileSide, rows = tokens - m0, left = columns - c0;
    const LinearOutput to = output->from(m0, c0);
    with_elements(to.bias, to.dtype, [&]<class T>(const T* bias) {
      const int64_t some = rows < ROWS * kTileSide ? rows : ROWS * kTileSide;
      if (bias) store_tile_sums<Product, T, true, COLUMNS>(block, some, left, bias, static_cast<T*>(to.data), to.stride);
      else store_tile_sums<Product, T, false, COLUMNS>(block, some, left, nullptr, static_cast<T*>(to.data), to.stride);
    });
  }
};

template <class Product>
  requires kOnTiles<Product>
struct ColumnLayout<Product> {
  static constexpr ColumnShape kMany{640, kMatrixTogether}, kFew{1024, 32};
  static constexpr int64_t kTurnedUnits = kMatrixTogether;
  static constexpr int64_t kTurnedColumns = 256;  // fewer are filled too often, and more have left L2 when the next call comes
  static constexpr TurnedFrom kTurnedFrom{32, 8, 0, TurnedFrom::kNever};
  static constexpr int64_t kRun = kTileSide;
  static constexpr int64_t kTokensTogether = kTileSide;
  static constexpr int64_t kMostTokens = kLinearTokens, kStripTokens = kMostTokens;
  static constexpr int32_t kPackedUnits = 512;  // 2 KiB: with L1's sets in at most two places of a row, L1 could not hold two strips

  static constexpr int64_t together(int64_t all_units) { return matrix_together(all_units); }
  static constexpr int64_t kRunUnits = kTileSide;
  static int64_t run_units(int64_t /*all_units*/, int64_t /*unit*/) { return kRunUnits; }
  static int64_t unit_at(int64_t tokens, int64_t all_units, int64_t m, int64_t unit) {
    return tile_at(together(all_units), all_units, strips_of(tokens), m / kTileSide, unit) + m % kTileSide * kTileSide;
  }

  static TileOperand rows(const ColumnShape& /*shape*/, const TokenUnits& matrix, int64_t tokens, int64_t all_units, int64_t m0,
                          int64_t unit) {
    const auto* data = static_cast<const float*>(matrix.data);
    if (matrix.as_it_lies) return {data + m0 * all_units + unit, kTileSide * all_units, kTileSide, 4 * all_units};
    const int64_t most = together(all_units), left = all_units - unit / most * most;
    return whole_tiles(data + unit_at(tokens, all_units, m0, unit), (most < left ? most : left) * kTileSide);
  }

  static int64_t sum_at(const ColumnShape& shape, int64_t m, int64_t c) {
    return m / kTileSide * kTileSide * shape.columns + c / kTileSide * kTileUnits + m % kTileSide * kTileSide + c % kTileSide;
  }

  static void multiply(const ColumnShape& shape, const TileOperand& a, int64_t tokens, int64_t count, const float* panel,
                       int64_t columns, float* sums, bool first, const LinearOutput* output) {
    const int64_t columns_of_tiles = (columns + kTileSide - 1) / kTileSide;
    TileFetch fetch{a.data, 0};
    if (tokens > kFewTokens) {  // the next strips' rows, which are in L3; after the last ones the next units'
      fetch.lines = (4 * kTileSide + columns_of_tiles - 1) / columns_of_tiles;
      fetch.run = a.at(2);
    }
    const int64_t steps = count / kTileSide;
    const StoreTiles<Product> store{output, tokens, columns};
    if (output) fetch.output_stride = store.row_bytes, fetch.rows = (2 * kTileSide + steps - 1) / steps;
    tile_product<false, true>(strips_of(tokens), columns_of_tiles, a, whole_tiles(panel, kTileSide * shape.padded_units()), sums,
                              shape.columns * kTileSide, steps, first, fetch, output ? &store : nullptr);
  }
};
#endif

// Units of each of the fewest passes of up to `most` that take `units`, or as many of them as lie together: even ones, multiples of
// `multiple`.
template <class Product>
constexpr int64_t pass_units(int64_t units, int64_t most, int64_t multiple) {
  const int64_t together = ColumnLayout<Product>::together(units), passes = (together + most - 1) / most;
  return passes <= 1 ? together : round_up((together + passes - 1) / passes, multiple);
}

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
      if constexpr (__is_same(E, T) && L::kTokensTogether > 1) {
        if (given == L::kRunUnits * Product::kUnitElements) {  // a line
          memcpy(out, row + first, L::kRunUnits * 4);
          continue;
        }
      }
      convert_row(row + first, given, out);
      for (int64_t i = given; i < room; ++i) convert(out[i], 0.0f);
    }
  }
}

// Outputs (tokens, columns), panel by panel, each multiplied by all tokens, strip after strip of them. In turn several matrices (tokens,
// units) may add to their sums.
template <class Product>
class ColumnSums {
  using L = ColumnLayout<Product>;

 public:
  ColumnSums(const ColumnShape& shape, int64_t tokens, int64_t columns, const LinearOutput& output, void* scratch)
      : shape_(shape), tokens_(tokens), columns_(columns), output_(output), panel_(static_cast<float*>(scratch)),
        sums_(panel_ + shape.panel_floats()) {}

  // Adds `rows` of `units` units times what fill(first unit, units, panel) puts into the panel, whole runs of columns. `last`: no more is
  // added.
  template <class Fill>
  void add(const TokenUnits& rows, int64_t units, bool last, const Fill& fill) {
    for (int64_t u0 = 0; u0 < units; u0 += shape_.units, first_ = false) {
      const int64_t count = u0 + shape_.units < units ? shape_.units : units - u0;
      const bool complete = last && u0 + count == units;
      fill(u0, count, panel_);
      for (int64_t m = 0, strip; m < tokens_; m += strip) {
        strip = L::kStripTokens < tokens_ - m ? L::kStripTokens : tokens_ - m;
        const LinearOutput output = output_.from(m, 0);
        L::multiply(shape_, L::rows(shape_, rows, tokens_, units, m, u0), strip, count, panel_, columns_,
                    sums_ + L::sum_at(shape_, m, 0), first_, complete ? &output : nullptr);
      }
    }
  }

 private:
  const ColumnShape& shape_;
  const int64_t tokens_, columns_;
  const LinearOutput output_;
  float *const panel_, *const sums_;
  bool first_ = true;
};

}  // namespace
}  // namespace halfbyte::cpu
