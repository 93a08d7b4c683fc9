// linear's forward for more tokens than the direct kernels take: weights from a decoded panel, tokens in vectors or in AMX's
// tiles. Included once per ISA.
#pragma once

#include "linear_kernel.h"

namespace halfbyte::cpu {
namespace {

constexpr int64_t kFewTokens = 64;  // up to here the activations fit L2 beside a panel

// A panel: weights that are decoded before they are multiplied, rows x units of K.
struct PanelShape {
  int64_t rows, units;
  constexpr int64_t stride() const {  // whole vectors; rows a multiple of 1 KiB apart would share L1 sets
    const int64_t floats = round_up(units, 16) + 16;
    return floats % 256 ? floats : floats + 16;
  }
  constexpr int64_t floats() const { return rows * stride(); }
};

// Where the parts of a product lie: `a` rows of units, whole vectors of them `kVectorStep` floats apart; sums of row r and token m at
// Sums::at(r, m), 16 tokens together. Sums::from begins at multiples of 16.
template <class Product>
struct Layout {
  struct Rows {
    const float* data;
    int64_t stride;
  };
  struct Scope {};  // what a thread has to set up
  static constexpr int64_t kBlockRows = 12;  // of the micro-kernel: by 1 or 2 vectors
  // Whole rows, up to what a decoder holds scales of: sums then stay in registers from the first unit to the last. So many of them that
  // each token's part of an output is whole cache lines, and that L2 holds 256 tokens of K = 576 beside them.
  static constexpr int64_t kMostUnits = kStretch / Product::kUnitElements;
  static constexpr PanelShape kMany{96, kMostUnits < 2048 ? kMostUnits : 2048};
  static constexpr int64_t kFewBytes = int64_t(128) << 10;  // of a panel that few tokens meet, unless one row of blocks is more
  static constexpr int64_t kDecodedRows = kMany.rows;       // at a time
  static constexpr bool kFetchDecoding = false;             // the next panel's codes are fetched while this one is multiplied
  static constexpr int64_t kVectorStep = kLanes;
  static constexpr bool kFetchStrips = kLanes < 16;  // AVX-512's micro-kernel fetches as it goes
  static constexpr int64_t kStreamedUnits = 1024;    // of a strip that is larger than L1

  // For so many tokens, and units in all.
  static constexpr PanelShape shape(int64_t tokens, int64_t all) {
    if (tokens > kFewTokens) return {kMany.rows, all < kMany.units ? all : kMany.units};
    const int64_t units = all < kMostUnits ? all : kMostUnits, rows = kFewBytes / 4 / units / kBlockRows * kBlockRows;
    return {rows < kBlockRows ? kBlockRows : rows < kMany.rows ? rows : kMany.rows, units};
  }

  struct Sums {
    float* data;
    int64_t stride;
    float* at(int64_t r, int64_t m) const { return data + r * stride + m; }
    Sums from(int64_t r, int64_t m) const { return {at(r, m), stride}; }
  };
  // `whole`: those of one strip at a time.
  static Sums sums(float* data, bool whole) { return {data, (whole ? kTileTokens : kLinearTokens) + 16}; }
  static constexpr int64_t kSumsFloats = kMany.rows * (kLinearTokens + 16);
  static_assert(shape(1, kMostUnits).floats() <= kMany.floats());

  static float* panel_row(const PanelShape& shape, float* panel, int64_t r) { return panel + r * shape.stride(); }
  static Rows panel(const PanelShape& shape, const float* panel) { return {panel, shape.stride()}; }
  static Rows rows(const float* data, int64_t stride) { return {data, stride}; }

  // Tokens of the next strip, of so many: `multiply` takes one, whose units stay in L1 while all rows of a panel pass.
  static constexpr int64_t strip_tokens(int64_t tokens) { return tile_vectors<Product>(tokens) * kLanes; }

  // The units that the strip from token `m` on has for a panel, fetched while `rows` rows meet the strip before it: those that L1 cannot
  // hold come from L2 for every micro-kernel but the first, and for that one they would come from L3.
  static Ahead next_strip(const float* activations, int64_t tokens, int64_t m, int64_t all_units, int64_t first_unit, int64_t count,
                          int64_t rows) {
    if (count < kStreamedUnits || tokens - m < kTileTokens) return {};
    const int64_t lines = count * kTileTokens * 4 / 64, of_row = (lines + rows - 1) / rows;
    return {reinterpret_cast<const uint8_t*>(activations + unit_at<Product>(all_units, tokens, m, kTileTokens, first_unit)), of_row * 64,
            count / of_row};
  }

  // sums (rows from `row` on, the strip's tokens) += a (rows, units [first_unit, + count)) times the activations (all_units, tokens)
  // of the strip from token m0 on.
  static void multiply(const Rows& a, int64_t row, int64_t rows, const float* activations, int64_t tokens, int64_t m0, int64_t all_units,
                       int64_t first_unit, int64_t count, const Sums& sums, bool first, const Ahead& next) {
    constexpr int R = kLanes == 16 ? 12 : 6;  // by 2 vectors, in 32 registers or in 16
    const int vectors = tile_vectors<Product>(tokens - m0);
    const float* b = activations + unit_at<Product>(all_units, tokens, m0, vectors * kLanes, first_unit);
    for (int64_t r = 0; r < rows; r += kBlockRows) {
      const float* at = a.data + r * a.stride;
      float* to = sums.at(row + r, 0);
      if (vectors == 1) {
        tile<Product, 12, 1>(at, a.stride, b, to, sums.stride, count, first, next.rows(r));
      } else {
        for (int h = 0; h < 12; h += R)
          tile<Product, R, 2>(at + h * a.stride, a.stride, b, to + h * sums.stride, sums.stride, count, first, next.rows(r + h));
      }
    }
  }
};

#if defined(HALFBYTE_TILES)
template <class Product>
  requires kOnTiles<Product>
struct Layout<Product> {
  using Scope = TileScope;
  static constexpr int64_t kBlockRows = 2 * kTileSide;
  static constexpr PanelShape kMany{192, kTogether};  // rows: of sums in L2
  static constexpr int64_t kDecodedRows = kBlockRows;  // in L1: what is decoded is multiplied by all tokens at once
  static constexpr bool kFetchDecoding = true;         // its products may be over too soon
  static constexpr bool kFetchStrips = false;          // `multiply` takes all at once
  static constexpr int64_t kVectorStep = kTileUnits;
  static constexpr int64_t kSumsStrip = kLinearTokens * kTileSide;

  static constexpr PanelShape shape(int64_t tokens, int64_t /*all*/) {
    return {tokens <= kFewTokens ? kBlockRows : kMany.rows, kTogether};
  }

  static float* panel_row(const PanelShape& shape, float* panel, int64_t r) {
    return panel + r / kTileSide * kTileSide * shape.stride() + r % kTileSide * kTileSide;
  }
  static TileOperand panel(const PanelShape& shape, const float* panel) { return whole_tiles(panel, kTileSide * shape.stride()); }
  static TileOperand rows(const float* data, int64_t stride) { return {data, kTileSide * stride, kTileSide, 4 * stride}; }

  struct Sums {
    float* data;
    float* at(int64_t r, int64_t m) const {
      return data + r / kTileSide * kSumsStrip + m / kTileSide * kTileUnits + r % kTileSide * kTileSide + m % kTileSide;
    }
    Sums from(int64_t r, int64_t m) const { return {at(r, m)}; }
  };
  static Sums sums(float* data, bool /*whole*/) { return {data}; }
  static constexpr int64_t kSumsFloats = kMany.rows * (kLinearTokens + 16);

  static constexpr int64_t strip_tokens(int64_t tokens) { return tokens; }

  static void multiply(const TileOperand& a, int64_t row, int64_t rows, const float* activations, int64_t tokens, int64_t /*m0*/,
                       int64_t all_units, int64_t first_unit, int64_t count, const Sums& sums, bool first, const Ahead& next) {
    const int64_t strips = strips_of(tokens), steps = count / kTileSide;
    const TileOperand b = whole_tiles(activations + tile_at(kTogether, all_units, strips, 0, first_unit), count * kTileSide);
    TileFetch fetch{b.data, 0};
    if (next.line && tokens > kFewTokens) {  // these rows' share of the next units' activations, which are in L3
      fetch.lines = (2 * kTileSide * kBlockRows + kMany.rows - 1) / kMany.rows;
      fetch.run = (first_unit + count < all_units ? b.at(strips) : activations) +
                  row / kBlockRows * ((strips + 1) / 2) * steps * fetch.lines * kTileSide;
    }
    tile_product<Product::kUnitElements == 4, false>(rows / kTileSide, strips, a, b, sums.at(row, 0), kSumsStrip, steps, first, fetch);
  }
};
#endif

// Rows [row_begin, row_end) times `tokens` activations of `all` units each, as many rows at a time as a panel has, strip by strip of
// tokens; their sums stay in L2 from one panel of units to the next. What is stored while the next strip is multiplied takes no time.
// `Rows` says how:
//   begin(rows, count)                                   `count` rows of the next sums
//   part(unit, count)                                    what decode has to know of so many units from `unit` on
//   decode(r, row, part, out, next, next_unit)           these of row r; row `next`, from its `next_unit` on, is decoded later
//   codes_at(unit), kLineUnits                           where a unit's code is in a row; units in 64 bytes of codes
//   finish(first_row, count, first_token, tokens, sums)  their sums of a strip are complete, and still in L2
template <class Product, class Rows>
inline void walk_panels(const uint8_t* packed, int64_t row_begin, int64_t row_end, int64_t row_bytes, const void* units,
                        int64_t tokens, int64_t all, void* scratch, Rows& rows) {
  using L = Layout<Product>;
  static_assert(L::kMany.rows % L::kBlockRows == 0 && L::kBlockRows <= kMostTileRows);
  [[maybe_unused]] const typename L::Scope scope{};
  float* panel = static_cast<float*>(scratch);
  const PanelShape shape = L::shape(tokens, all);
  const bool whole = shape.units >= all;  // sums are complete at once: all strips take the same place
  const auto sums = L::sums(panel + shape.floats(), whole);
  const auto* activations = static_cast<const float*>(units);
  for (int64_t n0 = row_begin, of_panel; n0 < row_end; n0 += of_panel) {
    of_panel = shape.rows - n0 % shape.rows;  // panels begin where cache lines of the output do
    if (of_panel > row_end - n0) of_panel = row_end - n0;
    rows.begin(packed + n0 * row_bytes, of_panel);
    for (int64_t u0 = 0; u0 < all; u0 += shape.units) {
      const int64_t count = u0 + shape.units < all ? shape.units : all - u0;
      const auto part = rows.part(u0, count);
      for (int64_t r0 = 0; r0 < of_panel; r0 += L::kDecodedRows) {
        const int64_t decoded = r0 + L::kDecodedRows < of_panel ? L::kDecodedRows : of_panel - r0;
        const int64_t padded = round_up(decoded, L::kBlockRows);
        const bool last_rows = r0 + decoded == of_panel, last = last_rows && u0 + count == all;
        const int64_t next_unit = last ? 0 : last_rows ? u0 + count : u0;
        const uint8_t* next_row = packed + (last ? n0 + of_panel : last_rows ? n0 : n0 + r0 + decoded) * row_bytes;
        for (int64_t r = 0; r < decoded; ++r)
          rows.decode(r0 + r, packed + (n0 + r0 + r) * row_bytes, part, L::panel_row(shape, panel, r), next_row + r * row_bytes, next_unit);
        for (int64_t r = decoded; r < padded; ++r)
          for (int64_t v = 0; v < count; v += kLanes) memset(L::panel_row(shape, panel, r) + v / kLanes * L::kVectorStep, 0, 4 * kLanes);
        // The line that the next codes end in: the one that they begin in came with what lies before them.
        Ahead next{next_row + rows.codes_at(next_unit) + 63, row_bytes, Rows::kLineUnits};
        for (int64_t m = 0, strip; m < tokens; m += strip, next = {}) {
          strip = L::strip_tokens(tokens - m);
          if (strip > tokens - m) strip = tokens - m;
          if constexpr (L::kFetchStrips)
            if (!next.line) next = L::next_strip(activations, tokens, m + strip, all, u0, count, padded);
          const auto of_strip = sums.from(0, whole ? 0 : m);
          L::multiply(L::panel(shape, panel), r0, padded, activations, tokens, m, all, u0, count, of_strip, u0 == 0, next);
          if (last) rows.finish(n0, of_panel, m, strip, of_strip);
        }
      }
    }
  }
}

// The first `bytes` of v, a multiple of 2. A call of memcpy would take longer.
inline void store_part(void* out, Vector v, int64_t bytes) {
  char from[sizeof v], *to = static_cast<char*>(out);
  memcpy(from, &v, sizeof v);
  int64_t i = 0;
  for (; i + 16 <= bytes; i += 16) memcpy(to + i, from + i, 16);
  if (bytes & 8) memcpy(to + i, from + i, 8), i += 8;
  if (bytes & 4) memcpy(to + i, from + i, 4), i += 4;
  if (bytes & 2) memcpy(to + i, from + i, 2);
}

// The sums of up to kLanes units of rows, kLanes tokens each -> (tokens, rows) of `out`; kWhole: as many of both. Two rows are rounded to
// a unit of two 16-bit numbers before they are turned: half the shuffles, and a strided read for every output would cost more.
template <class Product, class T, bool kBias, bool kWhole>
inline void store_turned_block(const typename Layout<Product>::Sums& sums, int64_t tokens, int64_t rows, const float* bias, T* out,
                               int64_t stride) {
  constexpr int kOfUnit = 4 / sizeof(T);
  const auto sums_of = [&](int r) __attribute__((always_inline)) {
    if (!kWhole && r >= rows) return zero_vector();
    const Vector row = Float32::load(sums.at(r, 0));
    return kBias ? row + Float32::broadcast(bias + r) : row;
  };
  const auto units = [&](int i) __attribute__((always_inline)) {
    if constexpr (kOfUnit == 1) return sums_of(i);
    else return round_pairs<Product, T, kBias>(sums_of(2 * i), sums_of(2 * i + 1));
  };
  turn_rows(units, [&](int i, Vector token) __attribute__((always_inline)) {
    if (kWhole) memcpy(out + i * stride, &token, sizeof token);
    else if (i < tokens) store_part(out + i * stride, token, (rows < kOfUnit * kLanes ? rows : kOfUnit * kLanes) * int64_t(sizeof(T)));
  });
}

template <class Product, class T, bool kBias>
inline void store_turned_as(const typename Layout<Product>::Sums& sums, int64_t tokens, int64_t rows, const float* bias, T* out,
                            int64_t stride) {
  constexpr int64_t kRows = 4 / sizeof(T) * kLanes;
  for (int64_t m = 0; m < tokens; m += kLanes) {
    for (int64_t r = 0; r < rows; r += kRows) {
      const auto from = sums.from(r, m);
      const float* added = kBias ? bias + r : nullptr;
      T* to = out + m * stride + r;
      if (tokens - m >= kLanes && rows - r >= kRows) store_turned_block<Product, T, kBias, true>(from, kLanes, kRows, added, to, stride);
      else store_turned_block<Product, T, kBias, false>(from, tokens - m, rows - r, added, to, stride);
    }
  }
}

// The sums of `rows` rows of a strip, plus bias -> output's columns from n0 on, of `tokens` tokens from m0 on.
template <class Product>
inline void store_turned(const typename Layout<Product>::Sums& sums, int64_t m0, int64_t tokens, int64_t n0, int64_t rows,
                         const LinearOutput& output) {
  with_elements(output.bias, output.dtype, [&]<class T>(const T* bias) {
    T* const out = static_cast<T*>(output.data) + m0 * output.stride + n0;
    if (!bias) return store_turned_as<Product, T, false>(sums, tokens, rows, nullptr, out, output.stride);
    float added[Layout<Product>::kMany.rows];
    for (int64_t r = 0; r < rows; ++r) added[r] = to_float(bias[n0 + r]);
    store_turned_as<Product, T, true>(sums, tokens, rows, added, out, output.stride);
  });
}

// linear's rows for walk_panels.
template <class Product, Codes codes>
class WeightRows {
  using L = Layout<Product>;
  using D = Decoder<Product, codes>;
  using Scales = typename D::PanelScales;
  using Part = RowPart<Product, codes>;
  static constexpr int64_t kGroupUnits = kGroup / Product::kUnitElements;

 public:
  static constexpr int64_t kLineUnits = 64 * kGroupUnits / D::kCodeBytes;

  WeightRows(const RowLayout& layout, int64_t tokens, const LowRank* low_rank, const LinearOutput& output)
      : l(layout), tokens(tokens), low_rank(low_rank), output(output), decoder(layout) {}

  static int64_t codes_at(int64_t unit) { return unit / kGroupUnits * D::kCodeBytes; }

  void begin(const uint8_t* rows, int64_t count) {
    if constexpr (Scales::kWholeRow)
      for (int64_t r = 0; r < count; ++r) scales[r].load(rows + r * l.row_bytes, l);
  }

  Part part(int64_t unit, int64_t count) const { return {l, unit / kGroupUnits, (count + kGroupUnits - 1) / kGroupUnits}; }

  void decode(int64_t r, const uint8_t* row, const Part& part, float* out, const uint8_t* next, int64_t next_unit) const {
    const auto place = [&](int64_t g, int i) __attribute__((always_inline)) { return out + (g * Product::kVectors + i) * L::kVectorStep; };
    decode_row<Product, codes>(decoder, row, l, part, place, Scales::kWholeRow ? scales + r : nullptr,
                               L::kFetchDecoding ? next + codes_at(next_unit) : nullptr);
    // Rows may be no whole lines: the one that these codes end in.
    if (L::kFetchDecoding) prefetch(next + codes_at(next_unit) + (part.whole + (part.rest != 0)) * D::kCodeBytes - 1);
    if (!Scales::kWholeRow) prefetch_scales(next, l, next_unit * Product::kUnitElements);
  }

  void finish(int64_t n0, int64_t rows, int64_t m0, int64_t count, const typename L::Sums& sums) const {
    if (low_rank) {
      const float* a = static_cast<const float*>(low_rank->weight) + n0 * low_rank->stride;
      const int64_t all = round_up((low_rank->rank + Product::kUnitElements - 1) / Product::kUnitElements, kUnitMultiple<Product>);
      constexpr int64_t kUnits = L::kMany.units;
      for (int64_t u = 0; u < all; u += kUnits)
        L::multiply(L::rows(a + u, low_rank->stride), 0, round_up(rows, L::kBlockRows), static_cast<const float*>(low_rank->input),
                    tokens, m0, all, u, u + kUnits < all ? kUnits : all - u, sums, false, {});
    }
    store_turned<Product>(sums, m0, count, n0, rows, output);
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
