// The eight tile registers of AMX, 16 rows of 64 bytes each. Everything that a machine without AMX cannot run is in this file:
// with HALFBYTE_EMULATE_AMX (tests/test_amx_kernels.py) the instructions are plain C++, and the kernels above them the same.
// Macros, because the intrinsics want the register's number as a literal.
#pragma once

#include <stdint.h>
#include <string.h>

#if !defined(HALFBYTE_EMULATE_AMX)
#include <immintrin.h>
#endif

namespace halfbyte::cpu {
namespace {

constexpr int kTileSide = 16;  // rows of a tile, and 4-byte units in each

#if defined(HALFBYTE_EMULATE_AMX)

struct EmulatedTiles {
  bool configured;
  uint8_t bytes[8][kTileSide][64];
};
thread_local EmulatedTiles emulated;

inline uint8_t (*emulated_tile(int t))[64] {
  if (!emulated.configured) __builtin_trap();  // illegal on the CPU, too
  return emulated.bytes[t];
}
inline void emulated_load(int t, const void* p, int64_t stride) {
  for (int r = 0; r < kTileSide; ++r) memcpy(emulated_tile(t)[r], static_cast<const char*>(p) + r * stride, 64);
}
inline void emulated_store(int t, void* p, int64_t stride) {
  for (int r = 0; r < kTileSide; ++r) memcpy(static_cast<char*>(p) + r * stride, emulated_tile(t)[r], 64);
}
// TDPBF16PS: even and odd products in sums of their own, added to the tile at the end.
inline void emulated_bf16(int c, int a, int b) {
  const auto value = [](const uint8_t* at) {
    uint16_t half;
    memcpy(&half, at, 2);
    const uint32_t word = uint32_t(half) << 16;
    float f;
    memcpy(&f, &word, 4);
    return f;
  };
  for (int m = 0; m < kTileSide; ++m) {
    for (int n = 0; n < kTileSide; ++n) {
      float even = 0.0f, odd = 0.0f, sum;
      for (int k = 0; k < kTileSide; ++k) {
        even = __builtin_fmaf(value(emulated_tile(a)[m] + 4 * k), value(emulated_tile(b)[k] + 4 * n), even);
        odd = __builtin_fmaf(value(emulated_tile(a)[m] + 4 * k + 2), value(emulated_tile(b)[k] + 4 * n + 2), odd);
      }
      memcpy(&sum, emulated_tile(c)[m] + 4 * n, 4);
      sum += even + odd;
      memcpy(emulated_tile(c)[m] + 4 * n, &sum, 4);
    }
  }
}
// TDPBSUD: signed bytes of a times unsigned bytes of b, into int32 that wrap.
inline void emulated_int8(int c, int a, int b) {
  for (int m = 0; m < kTileSide; ++m) {
    for (int n = 0; n < kTileSide; ++n) {
      uint32_t sum;
      memcpy(&sum, emulated_tile(c)[m] + 4 * n, 4);
      for (int k = 0; k < kTileSide; ++k)
        for (int e = 0; e < 4; ++e)
          sum += uint32_t(int32_t(int8_t(emulated_tile(a)[m][4 * k + e])) * int32_t(emulated_tile(b)[k][4 * n + e]));
      memcpy(emulated_tile(c)[m] + 4 * n, &sum, 4);
    }
  }
}

#define HALFBYTE_TILE_ZERO(t) memset(emulated_tile(t), 0, kTileSide * 64)
#define HALFBYTE_TILE_LOAD(t, p, stride) emulated_load(t, p, stride)
#define HALFBYTE_TILE_LOAD_ONCE(t, p, stride) emulated_load(t, p, stride)
#define HALFBYTE_TILE_STORE(t, p, stride) emulated_store(t, p, stride)
#define HALFBYTE_TILE_BF16(c, a, b) emulated_bf16(c, a, b)
#define HALFBYTE_TILE_INT8(c, a, b) emulated_int8(c, a, b)
#else
#define HALFBYTE_TILE_ZERO(t) _tile_zero(t)
#define HALFBYTE_TILE_LOAD(t, p, stride) _tile_loadd(t, p, stride)
#define HALFBYTE_TILE_LOAD_ONCE(t, p, stride) _tile_stream_loadd(t, p, stride)  // not to stay in L1
#define HALFBYTE_TILE_STORE(t, p, stride) _tile_stored(t, p, stride)
#define HALFBYTE_TILE_BF16(c, a, b) _tile_dpbf16ps(c, a, b)
#define HALFBYTE_TILE_INT8(c, a, b) _tile_dpbsud(c, a, b)
#endif

// This thread's tiles configured as whole ones for as long as this lives; afterwards they are released, so that neither
// other code finds them set up in a way it does not expect nor context switches carry 8 KiB.
class TileScope {
 public:
  TileScope() {
#if defined(HALFBYTE_EMULATE_AMX)
    emulated.configured = true;
#else
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof config == 64);
    _tile_loadconfig(&config);
#endif
  }
  ~TileScope() {
#if defined(HALFBYTE_EMULATE_AMX)
    emulated.configured = false;
#else
    _tile_release();
#endif
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

}  // namespace
}  // namespace halfbyte::cpu
