// The micro-kernel on AMX tiles, for bf16 pairs and int8 units: its operands already lie as the tiles want them (a: rows of
// units; b: a row of 16 columns for each unit). Included once, before linear_kernel.h.
//
// Cycles (Sapphire Rapids; by the instruction tables, this has not run on one): a tile product takes 16 cycles for 16 x 16
// sums of 32 bf16 (64 int8), a tile load 8 (16 rows, two a cycle from L1). 48 rows by 2 vectors of columns make 6 products
// and 7 loads for 16 units, 96 cycles against 56: bound by the products, 1024 flops a cycle. b (32 columns x 256 units, 32 KiB)
// stays in L1 over the panel's rows, a streams from L2 at 3 KiB in 96 cycles, half of what L2 gives. The sums are loaded and
// stored once in 256 units: 12 of 16 + 12 tile accesses, 6 %. Expected: nine tenths of the units' rate. 6 independent
// products cover the latency of 52 cycles; 3 (one vector left) just do not, 48.
#pragma once

#include "amx_tiles.h"

namespace halfbyte::cpu {
namespace {

#define HALFBYTE_TILES

template <class Product>
constexpr bool kOnTiles = Product::kUnitElements > 1;  // fp32 has no tile product

// sums (16 * ROWS, 16 * VECTORS) += a times b over `steps` runs of 16 units. Strides in units; b_stride: of one unit's columns.
#define HALFBYTE_TILE_PRODUCT(c, a, b)                            \
  if constexpr (kInteger) {                                       \
    HALFBYTE_TILE_INT8(c, a, b);                                  \
  } else {                                                        \
    HALFBYTE_TILE_BF16(c, a, b);                                  \
  }
#define HALFBYTE_EACH_SUM(APPLY)          \
  APPLY(0, 0, 0)                          \
  if constexpr (VECTORS > 1) APPLY(1, 0, 1) \
  if constexpr (ROWS > 1) APPLY(2, 1, 0)  \
  if constexpr (ROWS > 1 && VECTORS > 1) APPLY(3, 1, 1) \
  if constexpr (ROWS > 2) APPLY(4, 2, 0)  \
  if constexpr (ROWS > 2 && VECTORS > 1) APPLY(5, 2, 1)
#define HALFBYTE_SUM_AT(r, v) sums + (r)*kTileSide * sums_stride + (v)*kTileSide

template <bool kInteger, int ROWS, int VECTORS>
inline void tile_block(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* sums, int64_t sums_stride,
                       int64_t steps, bool first) {
  const int64_t a_bytes = 4 * a_stride, b_bytes = 4 * b_stride, sums_bytes = 4 * sums_stride;
  asm volatile("" ::: "memory");  // the compiler does not know that a tile load reads memory (g++ 12)
  if (first) {
#define HALFBYTE_CLEAR(t, r, v) { HALFBYTE_TILE_ZERO(t); }
    HALFBYTE_EACH_SUM(HALFBYTE_CLEAR)
  } else {
#define HALFBYTE_FETCH(t, r, v) { HALFBYTE_TILE_LOAD(t, HALFBYTE_SUM_AT(r, v), sums_bytes); }
    HALFBYTE_EACH_SUM(HALFBYTE_FETCH)
  }
  for (int64_t s = 0; s < steps; ++s, a += kTileSide, b += kTileSide * b_stride) {
    // tile 6: rows of a, 7: columns of b
    HALFBYTE_TILE_LOAD(6, a, a_bytes);
    HALFBYTE_TILE_LOAD(7, b, b_bytes);
    HALFBYTE_TILE_PRODUCT(0, 6, 7)
    if constexpr (VECTORS > 1) {
      HALFBYTE_TILE_LOAD(7, b + kTileSide, b_bytes);
      HALFBYTE_TILE_PRODUCT(1, 6, 7)
    }
    if constexpr (ROWS > 1) {
      HALFBYTE_TILE_LOAD(6, a + kTileSide * a_stride, a_bytes);
      if constexpr (VECTORS > 1) {
        HALFBYTE_TILE_PRODUCT(3, 6, 7)
        HALFBYTE_TILE_LOAD(7, b, b_bytes);
      }
      HALFBYTE_TILE_PRODUCT(2, 6, 7)
    }
    if constexpr (ROWS > 2) {
      HALFBYTE_TILE_LOAD(6, a + 2 * kTileSide * a_stride, a_bytes);
      HALFBYTE_TILE_PRODUCT(4, 6, 7)
      if constexpr (VECTORS > 1) {
        HALFBYTE_TILE_LOAD(7, b + kTileSide, b_bytes);
        HALFBYTE_TILE_PRODUCT(5, 6, 7)
      }
    }
  }
#define HALFBYTE_KEEP(t, r, v) { HALFBYTE_TILE_STORE(t, HALFBYTE_SUM_AT(r, v), sums_bytes); }
  HALFBYTE_EACH_SUM(HALFBYTE_KEEP)
  asm volatile("" ::: "memory");
}

// sums (rows, 16 * vectors) += a (rows, units) times b (units, 16 * vectors): whole tiles of rows and units only. rows and
// units must be multiples of 16.
template <class Product>
inline void tile_product(int64_t rows, int vectors, const float* a, int64_t a_stride, const float* b, float* sums,
                         int64_t sums_stride, int64_t units, bool first) {
  constexpr bool kInteger = Product::kUnitElements == 4;
  const int64_t b_stride = int64_t(vectors) * kTileSide, steps = units / kTileSide;
  const auto columns = [&]<int ROWS>(const float* at, float* to) {
    int v = 0;
    for (; v + 2 <= vectors; v += 2)
      tile_block<kInteger, ROWS, 2>(at, a_stride, b + v * kTileSide, b_stride, to + v * kTileSide, sums_stride, steps, first);
    if (v < vectors)
      tile_block<kInteger, ROWS, 1>(at, a_stride, b + v * kTileSide, b_stride, to + v * kTileSide, sums_stride, steps, first);
  };
  int64_t r = 0;
  for (; r + 3 * kTileSide <= rows; r += 3 * kTileSide) columns.template operator()<3>(a + r * a_stride, sums + r * sums_stride);
  if (rows - r == 2 * kTileSide) columns.template operator()<2>(a + r * a_stride, sums + r * sums_stride);
  if (rows - r == kTileSide) columns.template operator()<1>(a + r * a_stride, sums + r * sums_stride);
}

}  // namespace
}  // namespace halfbyte::cpu
