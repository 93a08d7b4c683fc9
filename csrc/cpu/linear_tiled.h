// linear's forward for more tokens than the direct kernels take: weights from a decoded panel, tokens in vectors or in AMX's
// tiles. Included once per ISA.
#pragma once

#include "linear_kernel.h"

namespace halfbyte::cpu {
namespace {

// Rows whose sums (384 KiB) are in L2 at a time, with vectors also their decoded weights (x kPanelUnits x 4 bytes = 192 KiB): the
// activations come from L3 once for so many rows, so half as many ask twice as much of what all cores share.
constexpr int64_t kPanelRows = 192;
constexpr int64_t kFewTokens = 64;  // up to here the activations of a panel fit L2, and the panel shrinks to L1: one row of blocks
constexpr int64_t kSumsStride = kLinearTokens + 16;

// Where the parts of a product lie: `a` rows of units, whole vectors of them `kVectorStep` floats apart; sums of row r and
// token m at sums_at(r, m), 16 tokens together, rows within 16 kSumsRow floats apart.
template <class Product>
struct Layout {
  struct Rows {
    const float* data;
    int64_t stride;
  };
  static constexpr int64_t kBlockRows = 12;  // of the micro-kernel: by 1 or 2 vectors; 6 by 4
  static constexpr int64_t kDecodedRows = kPanelRows;  // at a time
  static constexpr bool kFetchDecoding = false;        // the next panel's codes are fetched while this one is multiplied
  static constexpr int64_t kVectorStep = kLanes;
  static constexpr int64_t kPanelStride = kPanelUnits<Product> + 16;  // rows 1 KiB apart would share L1 sets
  static constexpr int64_t kSumsRow = kSumsStride;

  static float* panel_row(float* panel, int64_t r) { return panel + r * kPanelStride; }
  static Rows panel(const float* panel) { return {panel, kPanelStride}; }
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
  static constexpr int64_t kBlockRows = 2 * kTileSide;
  static constexpr int64_t kDecodedRows = kBlockRows;  // in L1: what is decoded is multiplied by all tokens at once
  static constexpr bool kFetchDecoding = true;         // its products may be over too soon
  static constexpr int64_t kVectorStep = kTileUnits;
  static constexpr int64_t kPanelStride = kPanelUnits<Product> + 16;  // a strip's first tile in other L1 sets than the next one's
  static constexpr int64_t kSumsRow = kTileSide;
  static constexpr int64_t kSumsStrip = kLinearTokens * kTileSide;

  static float* panel_row(float* panel, int64_t r) { return panel + r / kTileSide * kTileSide * kPanelStride + r % kTileSide * kTileSide; }
  static TileOperand panel(const float* panel) { return whole_tiles(panel, kTileSide * kPanelStride); }
  static TileOperand rows(const float* data, int64_t stride) { return {data, kTileSide * stride, kTileSide, 4 * stride}; }
  static int64_t sums_at(int64_t r, int64_t m) {
    return r / kTileSide * kSumsStrip + m / kTileSide * kTileUnits + r % kTileSide * kTileSide + m % kTileSide;
  }

  static void multiply(const TileOperand& a, int64_t row, int64_t rows, const float* activations, int64_t tokens, int64_t all_units,
                       int64_t first_unit, int64_t count, float* sums, bool first, const Ahead& next) {
    const int64_t strips = strips_of(tokens), steps = count / kTileSide;
    const TileOperand b = whole_tiles(activations + tile_at<Product>(all_units, strips, 0, first_unit), count * kTileSide);
    TileFetch fetch{b.data, 0};
    if (next.line && tokens > kFewTokens) {  // these rows' share of the next units' activations, which are in L3
      fetch.lines = (2 * kTileSide * kBlockRows + kPanelRows - 1) / kPanelRows;
      fetch.run = (first_unit + count < all_units ? b.at(strips) : activations) +
                  row / kBlockRows * ((strips + 1) / 2) * steps * fetch.lines * kTileSide;
    }
    tile_product<Product::kUnitElements == 4, false>(rows / kTileSide, strips, a, b, sums + sums_at(row, 0), kSumsStrip, steps, first,
                                                     fetch);
  }
};
#endif

static_assert(kPanelRows % Layout<Float32>::kBlockRows == 0);

template <class Product, Codes codes>
void tiled(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& l, const void* units, int64_t tokens,
           const LowRank* low_rank, const LinearOutput& output, void* scratch) {
  using L = Layout<Product>;
  constexpr int64_t kGroupUnits = kGroup / Product::kUnitElements;
  constexpr int64_t kPanelGroups = kPanelUnits<Product> / kGroupUnits, kCodeBytes = Decoder<Product, codes>::kCodeBytes;
  static_assert(kPanelRows % L::kBlockRows == 0 && L::kBlockRows <= kMostTileRows);
  const Decoder<Product, codes> decoder(l);
#if defined(HALFBYTE_TILES)
  const TileScope scope;
#endif
  float* panel = static_cast<float*>(scratch);
  float* sums = panel + kPanelRows * L::kPanelStride;
  using Scales = typename Decoder<Product, codes>::Scales;
  constexpr bool kWholeRow = Scales::kWholeRow;
  Scales scales[kWholeRow ? kPanelRows : 1];
  const auto* activations = static_cast<const float*>(units);
  const int64_t groups = padded_features(l) / kGroup;
  const int64_t panel_rows = tokens <= kFewTokens ? L::kBlockRows : kPanelRows;
  for (int64_t n0 = row_begin; n0 < row_end; n0 += panel_rows) {
    const int64_t rows = n0 + panel_rows < row_end ? panel_rows : row_end - n0;
    const int64_t rows_padded = round_up(rows, L::kBlockRows);
    if (kWholeRow)
      for (int64_t r = 0; r < rows; ++r) scales[r].load(packed + (n0 + r) * l.row_bytes, l, 0, l.in_features);
    for (int64_t g0 = 0; g0 < groups; g0 += kPanelGroups) {
      const int64_t count = g0 + kPanelGroups < groups ? kPanelGroups : groups - g0;
      for (int64_t r0 = 0; r0 < rows; r0 += L::kDecodedRows) {
        const int64_t decoded = r0 + L::kDecodedRows < rows ? L::kDecodedRows : rows - r0;
        const int64_t padded = round_up(decoded, L::kBlockRows);
        const bool last_rows = r0 + decoded == rows, last = last_rows && g0 + count == groups;
        const int64_t next_group = last ? 0 : last_rows ? g0 + count : g0;
        const int64_t next_row = last ? n0 + panel_rows : last_rows ? n0 : n0 + r0 + decoded;
        const uint8_t* next_rows = packed + next_row * l.row_bytes;
        const uint8_t* next_codes = next_rows + next_group * kCodeBytes;
        for (int64_t r = 0; r < decoded; ++r)
          decode_row<Product, codes, L::kVectorStep>(decoder, packed + (n0 + r0 + r) * l.row_bytes, l, g0, count,
                                                     L::panel_row(panel, r), kWholeRow ? scales + r0 + r : nullptr,
                                                     L::kFetchDecoding ? next_codes + r * l.row_bytes : nullptr);
        for (int64_t r = decoded; r < padded; ++r)
          for (int64_t v = 0; v < count * kGroupUnits / kLanes; ++v) memset(L::panel_row(panel, r) + v * L::kVectorStep, 0, 4 * kLanes);
        if (!kWholeRow)
          for (int64_t r = 0; r < decoded; ++r) prefetch(next_rows + r * l.row_bytes + scales_at(l, next_group * kGroup));
        const Ahead next{next_codes, l.row_bytes, 64 * kGroupUnits / kCodeBytes};
        L::multiply(L::panel(panel), r0, padded, activations, tokens, groups * kGroupUnits, g0 * kGroupUnits, count * kGroupUnits, sums,
                    g0 == 0, next);
      }
    }
    if (low_rank) {
      const float* a = static_cast<const float*>(low_rank->weight) + n0 * low_rank->stride;
      const int64_t all = round_up((low_rank->rank + Product::kUnitElements - 1) / Product::kUnitElements, kUnitMultiple<Product>);
      for (int64_t u = 0; u < all; u += kPanelUnits<Product>)
        L::multiply(L::rows(a + u, low_rank->stride), 0, rows_padded, static_cast<const float*>(low_rank->input), tokens, all, u,
                    u + kPanelUnits<Product> < all ? kPanelUnits<Product> : all - u, sums, false, {});
    }
    for (int64_t m0 = 0; m0 < tokens; m0 += kLanes) {
      const int64_t count = m0 + kLanes < tokens ? kLanes : tokens - m0;
      constexpr int64_t kTurnedStride = kPanelRows + 16;
      float turned[kLanes * kTurnedStride];  // a strided read for every output would cost more than the conversion
      for (int64_t r = 0; r < rows; r += kLanes) turn(sums + L::sums_at(r, m0), L::kSumsRow, turned + r, kTurnedStride);
      for (int64_t m = 0; m < count; ++m) store_output(output, m0 + m, n0, turned + m * kTurnedStride, rows);
    }
  }
}

}  // namespace
}  // namespace halfbyte::cpu
