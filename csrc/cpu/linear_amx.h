// The micro-kernel on AMX tiles, for bf16 pairs and int8 units: a holds rows of units, b a row of 16 columns for each unit, both
// in whole tiles, and so are the sums. Included once, before linear_kernel.h.
//
// By the instruction tables of Sapphire Rapids a tile product takes 16 cycles for 16 x 16 sums of 32 bf16 (64 int8), a tile load 8
// from L1 (16 rows, two a cycle); from L2 it is slower, the more so where rows lie apart. Two strips of a by two of b make 4
// products and 4 loads, 64 cycles against 32 from L1. Two strips of a stay in L1 while all strips of b come from L2: decoded weights,
// 128 units or 16 KiB, with b fetched to L1 one tile ahead, or tokens and gradients, up to 320 units or 40 KiB, past which b streams
// (tileloaddt1). The more units, the seldomer sums go to L2 and back. 4 independent products cover the latency of 52 cycles.
#pragma once

#include "amx_tiles.h"

namespace halfbyte::cpu {
namespace {

#define HALFBYTE_TILES

// Strips of 16 rows (of a) or columns (of b), each a run of tiles: floats from strip to strip and from tile to tile, bytes from
// row to row within one.
struct TileOperand {
  const float* data;
  int64_t strip, step, row_bytes;

  const float* at(int64_t s) const { return data + s * strip; }
};

constexpr int64_t kTileUnits = kTileSide * kTileSide;

// The usual case: tiles one after another.
inline TileOperand whole_tiles(const float* data, int64_t strip) { return {data, strip, kTileUnits, 64}; }

#define HALFBYTE_TILE_PRODUCT(c, a, b)                            \
  if constexpr (kInteger) {                                       \
    HALFBYTE_TILE_INT8(c, a, b);                                  \
  } else {                                                        \
    HALFBYTE_TILE_BF16(c, a, b);                                  \
  }
#define HALFBYTE_TILE_STREAM(t, p, stride)   \
  if constexpr (kOnce) {                     \
    HALFBYTE_TILE_LOAD_ONCE(t, p, stride);   \
  } else {                                   \
    HALFBYTE_TILE_LOAD(t, p, stride);        \
  }
#define HALFBYTE_EACH_SUM(APPLY, sums, strip)            \
  APPLY(0, sums)                                         \
  if constexpr (COLUMNS > 1) APPLY(1, sums + kTileUnits) \
  if constexpr (ROWS > 1) APPLY(2, sums + strip)         \
  if constexpr (ROWS > 1 && COLUMNS > 1) APPLY(3, sums + strip + kTileUnits)

// What is fetched to L2 in every step: `lines` of what later products will read of the streamed operand, and a line of each of `rows` rows
// of the output, which a block's sums go to next. Stores that miss L2 would hold up the next block; all lines at once its first tiles.
struct TileFetch {
  const float* run;
  int64_t lines;
  const char* output = nullptr;
  int64_t output_stride = 0, rows = 0;
};

// A tile whose rows follow one another, to L1.
inline void fetch_tile(const float* p) {
#pragma GCC unroll 16
  for (int r = 0; r < kTileSide; ++r) prefetch(p + r * kTileSide);
}

// Where the sums of ROWS strips by COLUMNS go: `from`, if they are not the first, are added to, `to` is written; strips of rows are
// `from_strip` and `to_strip` floats apart.
struct TileSums {
  const float* from;
  float* to;
  int64_t from_strip, to_strip;
};

// ROWS strips of a (from `row` on) by COLUMNS of b over `steps` tiles of each. kOnce: of b, which is more than L1 holds beside a, nothing
// is to stay in L1; otherwise it is fetched there one tile ahead.
template <bool kInteger, bool kOnce, int ROWS, int COLUMNS>
inline void tile_block(const TileOperand& a, int64_t row, const TileOperand& b, int64_t column, const TileSums& sums, int64_t steps,
                       bool first, TileFetch& fetch) {
  const float *a0 = a.at(row), *a1 = a.at(row + ROWS - 1), *b0 = b.at(column), *b1 = b.at(column + COLUMNS - 1);
  asm volatile("" ::: "memory");  // the compiler does not know that a tile load reads memory (g++ 12)
  if (first) {
#define HALFBYTE_CLEAR(t, at) { HALFBYTE_TILE_ZERO(t); }
    HALFBYTE_EACH_SUM(HALFBYTE_CLEAR, sums.from, sums.from_strip)
  } else {
#define HALFBYTE_FETCH(t, at) { HALFBYTE_TILE_LOAD(t, at, 64); }
    HALFBYTE_EACH_SUM(HALFBYTE_FETCH, sums.from, sums.from_strip)
  }
  for (int64_t s = 0; s < steps; ++s, a0 += a.step, a1 += a.step, b0 += b.step, b1 += b.step) {
    HALFBYTE_TILE_LOAD(4, a0, a.row_bytes);
    HALFBYTE_TILE_STREAM(6, b0, b.row_bytes);
    HALFBYTE_TILE_PRODUCT(0, 4, 6)
    if constexpr (COLUMNS > 1) {
      HALFBYTE_TILE_STREAM(7, b1, b.row_bytes);
      HALFBYTE_TILE_PRODUCT(1, 4, 7)
    }
    if constexpr (!kOnce) fetch_tile(b0 + b.step);
    if constexpr (ROWS > 1) {
      HALFBYTE_TILE_LOAD(5, a1, a.row_bytes);
      HALFBYTE_TILE_PRODUCT(2, 5, 6)
      if constexpr (COLUMNS > 1) {
        HALFBYTE_TILE_PRODUCT(3, 5, 7)
      }
    }
    if constexpr (COLUMNS > 1 && !kOnce) fetch_tile(b1 + b.step);
    for (int64_t i = 0; i < fetch.lines; ++i, fetch.run += kTileSide) prefetch_l2(fetch.run);
    for (int64_t i = 0; i < fetch.rows; ++i, fetch.output += fetch.output_stride) prefetch_l2(fetch.output);
  }
#define HALFBYTE_KEEP(t, at) { HALFBYTE_TILE_STORE(t, at, 64); }
  HALFBYTE_EACH_SUM(HALFBYTE_KEEP, sums.to, sums.to_strip)
  asm volatile("" ::: "memory");
}

// body.operator()<count>(start) for pairs of `strips`, and the one that may be left.
template <class Body>
inline void in_pairs(int64_t strips, const Body& body) {
  int64_t s = 0;
  for (; s + 2 <= strips; s += 2) body.template operator()<2>(s);
  if (s < strips) body.template operator()<1>(s);
}

// Sums that are not complete yet, or stay where they are.
struct NoDone {
  template <int ROWS, int COLUMNS>
  void operator()(int64_t, int64_t, const float*) const {}
  const char* line(int64_t, int64_t) const { return nullptr; }
};

// sums (tile after tile, strips of rows `sums_strip` floats apart) += a (rows strips) times b (columns strips) over `steps` tiles.
// Two strips of a stay in L1 over all of b; kOnce: no part of b does. done, if there is one: the sums are complete then, and
// done.operator()<ROWS, COLUMNS>(row, column, block) takes them instead, tile after tile, strips of rows COLUMNS tiles apart, to where
// done.line(row, column) is.
template <bool kInteger, bool kOnce, class Done = NoDone>
inline void tile_product(int64_t rows, int64_t columns, const TileOperand& a, const TileOperand& b, float* sums, int64_t sums_strip,
                         int64_t steps, bool first, TileFetch& fetch, const Done* done = nullptr) {
  alignas(64) float block[4 * kTileUnits];
  in_pairs(rows, [&]<int ROWS>(int64_t row) {
    in_pairs(columns, [&]<int COLUMNS>(int64_t column) {
      float* const at = sums + row * sums_strip + column * kTileUnits;
      const TileSums places = done ? TileSums{at, block, sums_strip, COLUMNS * kTileUnits} : TileSums{at, at, sums_strip, sums_strip};
      if (done) fetch.output = done->line(row, column);
      tile_block<kInteger, kOnce, ROWS, COLUMNS>(a, row, b, column, places, steps, first, fetch);
      if (done) done->template operator()<ROWS, COLUMNS>(row, column, block);
    });
  });
}

}  // namespace
}  // namespace halfbyte::cpu
