// linear: products of packed rows, decoded in registers or in a small panel, never as a dense weight. Included once per
// ISA, after linear_decode_<isa>.h.
//
// Every output is one fp32 sum over K (forward) or N (backward) in a fixed order, whatever the tiling and the threads.
// Legend: see linear_kernels.h; `codes` selects the decoder, `Product` the arithmetic.
#pragma once

#include "linear_pack.h"

namespace halfbyte::cpu {
namespace {

template <class T, bool kBias>
inline void store_values_of_row(const float* sums, int64_t count, const T* bias, T* out) {
  const auto store = [&](int64_t i) { out[i] = from_float<T>(kBias ? sums[i] + to_float(bias[i]) : sums[i]); };
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)  // loops of a known length become vectors
    for (int j = 0; j < 16; ++j) store(i + j);
  for (; i + 4 <= count; i += 4)  // few tokens' panels have 12 rows
    for (int j = 0; j < 4; ++j) store(i + j);
  for (; i < count; ++i) store(i);
}

template <class T>
inline void store_row(const float* sums, int64_t count, const void* bias, void* data) {
  if (bias) store_values_of_row<T, true>(sums, count, static_cast<const T*>(bias), static_cast<T*>(data));
  else store_values_of_row<T, false>(sums, count, nullptr, static_cast<T*>(data));
}

// output[token, column : column + count] = sums[i] + bias, rounded once.
inline void store_output(const LinearOutput& o, int64_t token, int64_t column, const float* sums, int64_t count) {
  const int64_t size = o.dtype == DType::kFloat32 ? 4 : 2;
  char* data = static_cast<char*>(o.data) + (token * o.stride + column) * size;
  const char* bias = o.bias ? static_cast<const char*>(o.bias) + column * size : nullptr;
  switch (o.dtype) {
    case DType::kFloat32: store_row<float>(sums, count, bias, data); break;
    case DType::kBFloat16: store_row<BFloat16>(sums, count, bias, data); break;
    case DType::kFloat16: store_row<Float16>(sums, count, bias, data); break;
  }
}

// The last group of a row, where it is not a whole one: its codes, then zeros (a load past them could leave the tensor,
// and an fp8 code of NaN there would outlive the product with a padding zero).
template <Codes codes>
struct TailCodes {
  uint8_t bytes[kGroup];

  void load(const uint8_t* row, const RowLayout& l, int64_t group) {
    const int64_t at = four_bit(codes) ? group * kGroup / 2 : group * kGroup;
    memset(bytes, 0, sizeof bytes);
    memcpy(bytes, row + at, size_t(l.code_bytes - at));
  }
};

// ---- direct: dot products of decoded registers with M activations, R rows at a time --------------------------------

template <class Product, Codes codes, int M>
inline void direct_group(const Decoder<Product, codes>& decoder, const uint8_t* c, const typename Decoder<Product, codes>::Scales& s,
                         int64_t group, const float* x, Vector sum[M]) {
  constexpr int kVectors = Product::kVectors;
  typename Product::Values v[kVectors];
  if constexpr (Product::kUnitElements == 1 && M < 4) {
    // One multiplication by the scales for each token's group is cheaper than one for each decoded vector.
    decoder.values(c, v);
    const Vector factor = decoder.scale(s, group);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const float* p = x + m * kVectors * kLanes;
      Vector even = Product::multiply_add(v[0], Product::load(p), zero_vector());
      Vector odd = Product::multiply_add(v[1], Product::load(p + kLanes), zero_vector());
#pragma GCC unroll 8
      for (int i = 2; i < kVectors; i += 2) {
        even = Product::multiply_add(v[i], Product::load(p + i * kLanes), even);
        odd = Product::multiply_add(v[i + 1], Product::load(p + (i + 1) * kLanes), odd);
      }
      sum[m] = Product::multiply_add(factor, even + odd, sum[m]);
    }
  } else {
    decoder.scaled(c, s, group, v);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sum[m] = Product::multiply_add(v[i], Product::load(x + (m * kVectors + i) * kLanes), sum[m]);
    }
  }
}

template <class Product, int R, int M>
inline void direct_low_rank(const LowRank& low_rank, int64_t row, Vector sum[R][M]) {
  const float* w = static_cast<const float*>(low_rank.weight) + row * low_rank.stride;
  const float* x = static_cast<const float*>(low_rank.input);
  for (int64_t u = 0; u < low_rank.stride; u += kLanes)
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m)
        sum[r][m] = Product::multiply_add(Product::load(w + r * low_rank.stride + u), Product::load(x + m * low_rank.stride + u), sum[r][m]);
}

template <class Product, Codes codes, int R, int M>
inline void direct_rows(const uint8_t* packed, int64_t row, const RowLayout& l, const Decoder<Product, codes>& decoder,
                        const float* x, const LowRank* low_rank, const LinearOutput& output) {
  using D = Decoder<Product, codes>;
  constexpr int kGroupUnits = M * kGroup / Product::kUnitElements;  // of all tokens, side by side: one base address
  Vector sum[R][M];
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) sum[r][m] = zero_vector();
  const uint8_t* base = packed + row * l.row_bytes;
  for (int64_t start = 0; start < l.in_features; start += kStretch) {
    const int64_t count = start + kStretch < l.in_features ? kStretch : l.in_features - start;
    const int64_t groups = count / kGroup, first = start / kGroup;
    typename D::Scales scales[R];
    for (int r = 0; r < R; ++r) scales[r].load(base + r * l.row_bytes, l, start, count);
    for (int64_t g = 0; g < groups; ++g) {
      const float* p = x + (first + g) * kGroupUnits;
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const uint8_t* c = base + r * l.row_bytes + (first + g) * D::kCodeBytes;
        prefetch(c + R * l.row_bytes);  // the same place of the next rows
        direct_group<Product, codes, M>(decoder, c, scales[r], g, p, sum[r]);
      }
    }
    if (groups * kGroup < count) {
      TailCodes<codes> tail;
      for (int r = 0; r < R; ++r) {
        tail.load(base + r * l.row_bytes, l, first + groups);
        direct_group<Product, codes, M>(decoder, tail.bytes, scales[r], groups, x + (first + groups) * kGroupUnits, sum[r]);
      }
    }
  }
  if (low_rank) direct_low_rank<Product, R, M>(*low_rank, row, sum);
  for (int m = 0; m < M; ++m) {
    float result[R];
    for (int r = 0; r < R; ++r) result[r] = horizontal_sum(sum[r][m]);
    store_output(output, m, row, result, R);
  }
}

template <class Product, Codes codes, int M>
void direct(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& l, const void* units,
            const LowRank* low_rank, const LinearOutput& output) {
  constexpr int R = kLanes < 16 ? 1 : M <= 2 ? 4 : 2;  // 16 registers hold one row's values and sums, 32 those of more
  const Decoder<Product, codes> decoder(l);
  const float* x = static_cast<const float*>(units);
  int64_t row = row_begin;
  for (; row + R <= row_end; row += R) direct_rows<Product, codes, R, M>(packed, row, l, decoder, x, low_rank, output);
  for (; row < row_end; ++row) direct_rows<Product, codes, 1, M>(packed, row, l, decoder, x, low_rank, output);
}

// ---- micro-kernel: sums (R, G vectors) += a (R, units), broadcast, times b (units, G vectors) ------------------------

constexpr int64_t kPrefetchUnits = 6;

// What the next panel will read of the packed rows, fetched while the micro-kernel has nothing else to fetch. Asked for where
// it is decoded, a panel's few lines of each row come all at once, and decoding waits for most of them.
struct Ahead {
  const uint8_t* line;  // of the first row; null: nothing
  int64_t stride;       // bytes from row to row
  int64_t units;        // of the micro-kernel that pass for every line of a row

  Ahead rows(int64_t count) const { return {line ? line + count * stride : nullptr, stride, units}; }
};

template <class Product, int R, int G>
inline void tile(const float* a, int64_t a_stride, const float* b, float* sums, int64_t sums_stride, int64_t units, bool first,
                 Ahead ahead = {}) {
  typename Product::Sum sum[R][G];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) sum[r][g] = first ? typename Product::Sum{} : Product::load_sums(sums + r * sums_stride + g * kLanes);
  for (int64_t u = 0, stop; u < units; u = stop) {
    stop = units;
    if (ahead.line) {
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) prefetch(ahead.line + r * ahead.stride);
      ahead.line += 64;
      if (u + ahead.units < units) stop = u + ahead.units;
    }
    for (int64_t i = u; i < stop; ++i, b += G * kLanes) {
      typename Product::Values v[G];
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        v[g] = Product::load(b + g * kLanes);
        if (kLanes == 16) prefetch(b + (kPrefetchUnits * G + g) * kLanes);  // b streams from L2, a new page every 16 units
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const typename Product::Values w = Product::broadcast(a + r * a_stride + i);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sum[r][g] = Product::multiply_add(w, v[g], sum[r][g]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) Product::store_sums(sums + r * sums_stride + g * kLanes, sum[r][g]);
}

constexpr int64_t kRowsAhead = 16;  // rows of a backward panel whose codes are on their way

// Decoded groups [first, first + count) of one row, in decode order. A partial last group is filled up with anything finite
// that its scale allows: the activations there are zero, or the columns are not stored.
// Vectors are stored kStep floats apart. `loaded`: the row's scales, where they hold for all of it. `next`: as many codes that
// are fetched meanwhile.
template <class Product, Codes codes, int64_t kStep = kLanes>
inline void decode_row(const Decoder<Product, codes>& decoder, const uint8_t* row, const RowLayout& l, int64_t first, int64_t count,
                       float* out, const typename Decoder<Product, codes>::Scales* loaded = nullptr, const uint8_t* next = nullptr) {
  using D = Decoder<Product, codes>;
  const int64_t start = first * kGroup;
  const int64_t length = start + count * kGroup < l.in_features ? count * kGroup : l.in_features - start;
  typename D::Scales own;
  if (!loaded) own.load(row, l, start, length);
  const typename D::Scales& scales = loaded ? *loaded : own;
  typename Product::Values v[Product::kVectors];
  const int64_t whole = length / kGroup;
  for (int64_t g = 0; g < whole; ++g, out += Product::kVectors * kStep) {
    const uint8_t* codes_of_group = row + (first + g) * D::kCodeBytes;
    if (next)
      for (int i = 0; i < D::kCodeBytes; i += 64) prefetch(next + g * D::kCodeBytes + i);
    decoder.scaled(codes_of_group, scales, g, v);
#pragma GCC unroll 8
    for (int i = 0; i < Product::kVectors; ++i) store_values(out + i * kStep, v[i]);
  }
  if (whole * kGroup < length) {
    TailCodes<codes> tail;
    tail.load(row, l, first + whole);
    decoder.scaled(tail.bytes, scales, whole, v);
    for (int i = 0; i < Product::kVectors; ++i) store_values(out + i * kStep, v[i]);
  }
}

// ---- tiled forward: weights from a decoded panel, tokens in vectors or tiles ------------------------------------------

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
  static constexpr bool kFetchDecoding = true;         // tiles have no time to wait for it
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

// ---- backward: gradients broadcast, columns of a decoded panel in vectors -------------------------------------------

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
