// Launch geometry and index arithmetic as pure functions, host and device (tests/cuda/test_geometry.py: extreme sizes).
// A unit is 8 consecutive elements of one row: 4 or 8 code bytes, always inside one block (blocks are multiples of 32).
#pragma once

#include <cstdint>

#include "../formats.h"

namespace halfbyte::cuda {

constexpr int64_t kUnit = 8;
constexpr int64_t kMaxUnitsPerLaunch = (int64_t(1) << 31) - 1;

HALFBYTE_HD constexpr int64_t units_of(int64_t elements) { return (elements + kUnit - 1) / kUnit; }

// log2 of a power of two.
constexpr int log2_of(int64_t power) {
  int log2 = 0;
  while ((int64_t(1) << log2) < power) ++log2;
  return log2;
}

// n / divisor for 0 <= n < 2^31 by one multiplication (Granlund and Montgomery 1994): multiplier = ceil(2^p / divisor),
// p = 31 + ceil(log2 divisor), so the multiplier fits 32 bits and the error term stays below 1 / divisor.
struct FastDivisor {
  uint32_t divisor = 1, multiplier = 0, shift = 0;
  FastDivisor() = default;
  explicit FastDivisor(uint32_t d) : divisor(d) {
    if (d <= 1) return;
    uint32_t log2 = 0;
    while ((uint64_t(1) << log2) < d) ++log2;
    shift = log2 - 1;
    multiplier = uint32_t(((uint64_t(1) << (31 + log2)) + d - 1) / d);
  }
  HALFBYTE_HD uint32_t quotient(uint32_t n) const {
    if (divisor == 1) return n;
#if defined(__CUDA_ARCH__)
    return __umulhi(n, multiplier) >> shift;
#else
    return uint32_t((uint64_t(n) * multiplier) >> 32) >> shift;
#endif
  }
};

// Part of a (rows, items_per_row) grid that one launch covers with 32-bit item indices.
struct Tile {
  int64_t first_row, rows, first_item, items;
};

// Calls launch(tile) until the grid is covered or launch returns non-zero; returns what the last one returned.
template <class Launch>
auto for_each_tile(int64_t rows, int64_t items_per_row, const Launch& launch) {
  decltype(launch(Tile{})) status{};
  const int64_t columns = items_per_row < kMaxUnitsPerLaunch ? items_per_row : kMaxUnitsPerLaunch;
  if (rows <= 0 || columns <= 0) return status;
  const int64_t rows_per_launch = kMaxUnitsPerLaunch / columns;
  for (int64_t r = 0; r < rows; r += rows_per_launch) {
    const int64_t count = rows - r < rows_per_launch ? rows - r : rows_per_launch;
    for (int64_t c = 0; c < items_per_row; c += columns) {
      status = launch(Tile{r, count, c, items_per_row - c < columns ? items_per_row - c : columns});
      if (int(status) != 0) return status;
    }
  }
  return status;
}

// Widest of 16, 8, 4, 2, 1 bytes that divides the address and the row pitch.
inline int access_width(const void* address, int64_t row_pitch) {
  const uint64_t bits = reinterpret_cast<uint64_t>(address) | uint64_t(row_pitch) | 16u;
  return int(bits & (~bits + 1));
}

}  // namespace halfbyte::cuda
