// The micro-kernel on AMX tiles, for bf16 pairs and int8 units: a holds rows of units, b a row of 16 columns for each unit, both
// in whole tiles, and so are the sums. Included once, before linear_kernel.h.
//
// By the instruction tables of Sapphire Rapids a tile product takes 16 cycles for 16 x 16 sums of 32 bf16 (64 int8), a tile load 8
// from L1 (16 rows, two a cycle); from L2 it is slower, the more so where rows lie apart. Two strips of a by two of b make 4
// products and 4 loads, 64 cycles against 32 from L1. Two strips of a (128 units: 16 KiB; decoded weights forward, gradients
// backward) stay in L1 while all strips of b come from L2, fetched one tile ahead. 4 independent products cover the latency of 52
// cycles.
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
#define HALFBYTE_EACH_SUM(APPLY)                        \
  APPLY(0, sums)                                        \
  if constexpr (COLUMNS > 1) APPLY(1, sums + kTileUnits) \
  if constexpr (ROWS > 1) APPLY(2, sums + sums_strip)    \
  if constexpr (ROWS > 1 && COLUMNS > 1) APPLY(3, sums + sums_strip + kTileUnits)

// What later products will read of the streamed operand, fetched to L2 meanwhile: `lines` of it in every step.
struct TileFetch {
  const float* run;
  int64_t lines;
};

// A tile whose rows follow one another, to L1.
inline void fetch_tile(const float* p) {
#pragma GCC unroll 16
  for (int r = 0; r < kTileSide; ++r) prefetch(p + r * kTileSide);
}

// sums of ROWS strips of a (from `row` on) by COLUMNS of b += over `steps` tiles of each.
template <bool kInteger, int ROWS, int COLUMNS>
inline void tile_block(const TileOperand& a, int64_t row, const TileOperand& b, int64_t column, float* sums, int64_t sums_strip,
                       int64_t steps, bool first, TileFetch& fetch) {
  const float *a0 = a.at(row), *a1 = a.at(row + ROWS - 1), *b0 = b.at(column), *b1 = b.at(column + COLUMNS - 1);
  asm volatile("" ::: "memory");  // the compiler does not know that a tile load reads memory (g++ 12)
  if (first) {
#define HALFBYTE_CLEAR(t, at) { HALFBYTE_TILE_ZERO(t); }
    HALFBYTE_EACH_SUM(HALFBYTE_CLEAR)
  } else {
#define HALFBYTE_FETCH(t, at) { HALFBYTE_TILE_LOAD(t, at, 64); }
    HALFBYTE_EACH_SUM(HALFBYTE_FETCH)
  }
  for (int64_t s = 0; s < steps; ++s, a0 += a.step, a1 += a.step, b0 += b.step, b1 += b.step) {
    HALFBYTE_TILE_LOAD(4, a0, a.row_bytes);
    HALFBYTE_TILE_LOAD(6, b0, b.row_bytes);
    HALFBYTE_TILE_PRODUCT(0, 4, 6)
    if constexpr (COLUMNS > 1) {
      HALFBYTE_TILE_LOAD(7, b1, b.row_bytes);
      HALFBYTE_TILE_PRODUCT(1, 4, 7)
    }
    fetch_tile(b0 + b.step);
    if constexpr (ROWS > 1) {
      HALFBYTE_TILE_LOAD(5, a1, a.row_bytes);
      HALFBYTE_TILE_PRODUCT(2, 5, 6)
      if constexpr (COLUMNS > 1) {
        HALFBYTE_TILE_PRODUCT(3, 5, 7)
      }
    }
    if constexpr (COLUMNS > 1) fetch_tile(b1 + b.step);
    for (int64_t i = 0; i < fetch.lines; ++i, fetch.run += kTileSide) prefetch_l2(fetch.run);
  }
#define HALFBYTE_KEEP(t, at) { HALFBYTE_TILE_STORE(t, at, 64); }
  HALFBYTE_EACH_SUM(HALFBYTE_KEEP)
  asm volatile("" ::: "memory");
}

// body.operator()<count>(start) for pairs of `strips`, and the one that may be left.
template <class Body>
inline void in_pairs(int64_t strips, const Body& body) {
  int64_t s = 0;
  for (; s + 2 <= strips; s += 2) body.template operator()<2>(s);
  if (s < strips) body.template operator()<1>(s);
}

// sums (tile after tile, strips of rows `sums_strip` floats apart) += a (rows strips) times b (columns strips) over `steps` tiles.
// Two strips of a stay in L1 over all of b.
template <bool kInteger>
inline void tile_product(int64_t rows, int64_t columns, const TileOperand& a, const TileOperand& b, float* sums, int64_t sums_strip,
                         int64_t steps, bool first, TileFetch& fetch) {
  in_pairs(rows, [&]<int ROWS>(int64_t row) {
    in_pairs(columns, [&]<int COLUMNS>(int64_t column) {
      tile_block<kInteger, ROWS, COLUMNS>(a, row, b, column, sums + row * sums_strip + column * kTileUnits, sums_strip, steps, first,
                                          fetch);
    });
  });
}

}  // namespace
}  // namespace halfbyte::cpu
