// linear's forward for more tokens than the direct kernels take: weights from a decoded panel, tokens in vectors or in AMX's
// tiles. Included once per ISA.
#pragma once

#include "linear_kernel.h"

namespace halfbyte::cpu {
namespace {

constexpr int64_t kFewTokens = 64;  // up to here the activations fit L2, and a panel needs no more than one row of blocks
constexpr int64_t kSumsStride = kLinearTokens + 16;

// A panel: weights that are decoded before they are multiplied, rows x units of K.
struct PanelShape {
  int64_t rows, units;
  constexpr int64_t stride() const { return units + 16; }  // rows a multiple of 1 KiB apart would share L1 sets
  constexpr int64_t scratch_floats() const { return rows * (stride() + kSumsStride); }
};

// Where the parts of a product lie: `a` rows of units, whole vectors of them `kVectorStep` floats apart; sums of row r and
// token m at sums_at(r, m), 16 tokens together, rows within 16 kSumsRow floats apart.
template <class Product>
struct Layout {
  struct Rows {
    const float* data;
    int64_t stride;
  };
  struct Scope {};  // what a thread has to set up
  static constexpr int64_t kBlockRows = 12;  // of the micro-kernel: by 1 or 2 vectors; 6 by 4
  // Whole rows, up to what a decoder holds scales of: sums then stay in registers from the first unit to the last. The activations
  // come from L3 once for all rows of a panel, so half as many would ask twice as much of what all cores share.
  static constexpr int64_t kMostUnits = kStretch / Product::kUnitElements;
  static constexpr PanelShape kMany{144, kMostUnits < 2048 ? kMostUnits : 2048}, kFew{kBlockRows, kMostUnits};
  static constexpr int64_t kDecodedRows = kMany.rows;  // at a time
  static constexpr bool kFetchDecoding = false;        // the next panel's codes are fetched while this one is multiplied
  static constexpr int64_t kVectorStep = kLanes;
  static constexpr int64_t kSumsRow = kSumsStride;

  static float* panel_row(const PanelShape& shape, float* panel, int64_t r) { return panel + r * shape.stride(); }
  static Rows panel(const PanelShape& shape, const float* panel) { return {panel, shape.stride()}; }
  static Rows rows(const float* data, int64_t stride) { return {data, stride}; }
  static int64_t sums_at(int64_t r, int64_t m) { return r * kSumsStride + m; }

  // sums (rows from `row` on, tokens) += a (rows, units [first_unit, + count)) times activations (all_units, tokens).
  static void multiply(const Rows& a, int64_t row, int64_t rows, const float* activations, int64_t tokens, int64_t all_units,
                       int64_t first_unit, int64_t count, float* sums, bool first, Ahead next) {
    constexpr bool kWide = kLanes == 16;  // 32 registers
    for (int64_t m0 = 0; m0 < tokens;) {
      const int vectors = tile_vectors<Product>(tokens - m0);
      const float* b = activations + unit_at<Product>(all_units, tokens, m0, vectors * kLanes, first_unit);
      for (int64_t r = 0; r < rows; r += kBlockRows) {
        const float* at = a.data + r * a.stride;
        float* to = sums + sums_at(row + r, m0);
        const Ahead mine = next.rows(r);
        if (vectors == 1) {
          tile<Product, 12, 1>(at, a.stride, b, to, kSumsStride, count, first, mine);
        } else if (vectors == 2 && kWide) {
          tile<Product, kWide ? 12 : 1, 2>(at, a.stride, b, to, kSumsStride, count, first, mine);
        } else {
          constexpr int G = kWide ? 4 : 2;
          for (int h = 0; h < 12; h += 6)
            tile<Product, 6, G>(at + h * a.stride, a.stride, b, to + h * kSumsStride, kSumsStride, count, first, mine.rows(h));
        }
      }
      m0 += vectors * kLanes;
      next = {};
    }
  }
};

#if defined(HALFBYTE_TILES)
template <class Product>
  requires kOnTiles<Product>
struct Layout<Product> {
  using Scope = TileScope;
  static constexpr int64_t kBlockRows = 2 * kTileSide;
  static constexpr PanelShape kMany{192, kTogether}, kFew{kBlockRows, kTogether};  // rows: of sums in L2
  static constexpr int64_t kDecodedRows = kBlockRows;  // in L1: what is decoded is multiplied by all tokens at once
  static constexpr bool kFetchDecoding = true;         // its products may be over too soon
  static constexpr int64_t kVectorStep = kTileUnits;
  static constexpr int64_t kSumsRow = kTileSide;
  static constexpr int64_t kSumsStrip = kLinearTokens * kTileSide;

  static float* panel_row(const PanelShape& shape, float* panel, int64_t r) {
    return panel + r / kTileSide * kTileSide * shape.stride() + r % kTileSide * kTileSide;
  }
  static TileOperand panel(const PanelShape& shape, const float* panel) { return whole_tiles(panel, kTileSide * shape.stride()); }
  static TileOperand rows(const float* data, int64_t stride) { return {data, kTileSide * stride, kTileSide, 4 * stride}; }
  static int64_t sums_at(int64_t r, int64_t m) {
    return r / kTileSide * kSumsStrip + m / kTileSide * kTileUnits + r % kTileSide * kTileSide + m % kTileSide;
  }

  static void multiply(const TileOperand& a, int64_t row, int64_t rows, const float* activations, int64_t tokens, int64_t all_units,
                       int64_t first_unit, int64_t count, float* sums, bool first, const Ahead& next) {
    const int64_t strips = strips_of(tokens), steps = count / kTileSide;
    const TileOperand b = whole_tiles(activations + tile_at(all_units, strips, 0, first_unit), count * kTileSide);
    TileFetch fetch{b.data, 0};
    if (next.line && tokens > kFewTokens) {  // these rows' share of the next units' activations, which are in L3
      fetch.lines = (2 * kTileSide * kBlockRows + kMany.rows - 1) / kMany.rows;
      fetch.run = (first_unit + count < all_units ? b.at(strips) : activations) +
                  row / kBlockRows * ((strips + 1) / 2) * steps * fetch.lines * kTileSide;
    }
    tile_product<Product::kUnitElements == 4>(rows / kTileSide, strips, a, b, sums + sums_at(row, 0), kSumsStrip, steps, first,
                                              fetch);
  }
};
#endif

// Rows [row_begin, row_end) times `tokens` activations of `all` units each, as many rows at a time as a panel has; their sums stay in
// L2 from one panel of units to the next. `Rows` says how:
//   begin(rows, count)                                 `count` rows of the next sums
//   decode(r, row, unit, count, out, next, next_unit)  units of row r of them; row `next`, from its `next_unit` on, is decoded later
//   codes_at(unit), kLineUnits                         where a unit's code is in a row; units in 64 bytes of codes
//   finish(first_row, count, sums)                     their sums are complete
template <class Product, class Rows>
inline void walk_panels(const uint8_t* packed, int64_t row_begin, int64_t row_end, int64_t row_bytes, const void* units,
                        int64_t tokens, int64_t all, void* scratch, Rows& rows) {
  using L = Layout<Product>;
  static_assert(L::kMany.rows % L::kBlockRows == 0 && L::kBlockRows <= kMostTileRows);
  [[maybe_unused]] const typename L::Scope scope{};
  float* panel = static_cast<float*>(scratch);
  const PanelShape& shape = tokens <= kFewTokens ? L::kFew : L::kMany;
  float* sums = panel + shape.rows * shape.stride();
  const auto* activations = static_cast<const float*>(units);
  for (int64_t n0 = row_begin; n0 < row_end; n0 += shape.rows) {
    const int64_t of_panel = n0 + shape.rows < row_end ? shape.rows : row_end - n0;
    rows.begin(packed + n0 * row_bytes, of_panel);
    for (int64_t u0 = 0; u0 < all; u0 += shape.units) {
      const int64_t count = u0 + shape.units < all ? shape.units : all - u0;
      for (int64_t r0 = 0; r0 < of_panel; r0 += L::kDecodedRows) {
        const int64_t decoded = r0 + L::kDecodedRows < of_panel ? L::kDecodedRows : of_panel - r0;
        const int64_t padded = round_up(decoded, L::kBlockRows);
        const bool last_rows = r0 + decoded == of_panel, last = last_rows && u0 + count == all;
        const int64_t next_unit = last ? 0 : last_rows ? u0 + count : u0;
        const uint8_t* next_row = packed + (last ? n0 + shape.rows : last_rows ? n0 : n0 + r0 + decoded) * row_bytes;
        for (int64_t r = 0; r < decoded; ++r)
          rows.decode(r0 + r, packed + (n0 + r0 + r) * row_bytes, u0, count, L::panel_row(shape, panel, r), next_row + r * row_bytes,
                      next_unit);
        for (int64_t r = decoded; r < padded; ++r)
          for (int64_t v = 0; v < count; v += kLanes) memset(L::panel_row(shape, panel, r) + v / kLanes * L::kVectorStep, 0, 4 * kLanes);
        // The line that the next codes end in: the one that they begin in came with what lies before them.
        const Ahead next{next_row + rows.codes_at(next_unit) + 63, row_bytes, Rows::kLineUnits};
        L::multiply(L::panel(shape, panel), r0, padded, activations, tokens, all, u0, count, sums, u0 == 0, next);
      }
    }
    rows.finish(n0, of_panel, sums);
  }
}

// Sums of `rows` rows -> output's columns from n0 on. A strided read for every output would cost more than `turn`.
template <class Product>
inline void store_turned(const float* sums, int64_t tokens, int64_t n0, int64_t rows, const LinearOutput& output) {
  using L = Layout<Product>;
  constexpr int64_t kStride = L::kMany.rows + 16;
  float turned[kLanes * kStride];
  for (int64_t m0 = 0; m0 < tokens; m0 += kLanes) {
    const int64_t count = m0 + kLanes < tokens ? kLanes : tokens - m0;
    for (int64_t r = 0; r < rows; r += kLanes) turn(sums + L::sums_at(r, m0), L::kSumsRow, turned + r, kStride);
    for (int64_t m = 0; m < count; ++m) store_output<Product>(output, m0 + m, n0, turned + m * kStride, rows);
  }
}

// linear's rows for walk_panels.
template <class Product, Codes codes>
class WeightRows {
  using L = Layout<Product>;
  using D = Decoder<Product, codes>;
  using Scales = typename D::Scales;
  static constexpr int64_t kGroupUnits = kGroup / Product::kUnitElements;

 public:
  static constexpr int64_t kLineUnits = 64 * kGroupUnits / D::kCodeBytes;

  WeightRows(const RowLayout& layout, int64_t tokens, const LowRank* low_rank, const LinearOutput& output)
      : l(layout), tokens(tokens), low_rank(low_rank), output(output), decoder(layout) {}

  static int64_t codes_at(int64_t unit) { return unit / kGroupUnits * D::kCodeBytes; }

  void begin(const uint8_t* rows, int64_t count) {
    if (Scales::kWholeRow)
      for (int64_t r = 0; r < count; ++r) scales[r].load(rows + r * l.row_bytes, l, 0, l.in_features);
  }

  void decode(int64_t r, const uint8_t* row, int64_t unit, int64_t count, float* out, const uint8_t* next, int64_t next_unit) const {
    decode_row<Product, codes, L::kVectorStep>(decoder, row, l, unit / kGroupUnits, (count + kGroupUnits - 1) / kGroupUnits, out,
                                               Scales::kWholeRow ? scales + r : nullptr,
                                               L::kFetchDecoding ? next + codes_at(next_unit) : nullptr);
    if (!Scales::kWholeRow) prefetch(next + scales_at(l, next_unit * Product::kUnitElements));
  }

  void finish(int64_t n0, int64_t rows, float* sums) const {
    if (low_rank) {
      const float* a = static_cast<const float*>(low_rank->weight) + n0 * low_rank->stride;
      const int64_t all = round_up((low_rank->rank + Product::kUnitElements - 1) / Product::kUnitElements, kUnitMultiple<Product>);
      constexpr int64_t kUnits = L::kMany.units;
      for (int64_t u = 0; u < all; u += kUnits)
        L::multiply(L::rows(a + u, low_rank->stride), 0, round_up(rows, L::kBlockRows), static_cast<const float*>(low_rank->input),
                    tokens, all, u, u + kUnits < all ? kUnits : all - u, sums, false, {});
    }
    store_turned<Product>(sums, tokens, n0, rows, output);
  }

 private:
  const RowLayout& l;
  const int64_t tokens;
  const LowRank* const low_rank;
  const LinearOutput& output;
  const D decoder;
  Scales scales[Scales::kWholeRow ? L::kMany.rows : 1];
};

template <class Product, Codes codes>
void tiled(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& l, const void* units, int64_t tokens,
           const LowRank* low_rank, const LinearOutput& output, void* scratch) {
  WeightRows<Product, codes> rows(l, tokens, low_rank, output);
  const int64_t all = padded_features<Product, codes>(l) / Product::kUnitElements;
  walk_panels<Product>(packed, row_begin, row_end, l.row_bytes, units, tokens, all, scratch, rows);
}

}  // namespace
}  // namespace halfbyte::cpu
