// Scales of 4-bit blocks as floats. Included once per ISA.
#pragma once

#include "kernels.h"
#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

// absmax of blocks [first, first + count) of a 4-bit row.
inline void load_block_scales(const uint8_t* row, const RowLayout& l, int64_t first, int64_t count, float* value) {
  int64_t b = 0;
  if (is_double_quantized(l.format)) {
    float step, low;
    memcpy(&step, row + l.scales_offset, 4);
    memcpy(&low, row + l.scales_offset + 4, 4);
    const uint8_t* codes = row + l.code_bytes + first;
    for (; b + 8 <= count; b += 8) {
      uint8_t run[8];  // a copy: bytes may alias the floats, and the loop would not become vectors
      memcpy(run, codes + b, 8);
      for (int i = 0; i < 8; ++i) value[b + i] = fmaf(float(run[i]), step, low);
    }
    for (; b < count; ++b) value[b] = fmaf(float(codes[b]), step, low);
  } else {
    const uint8_t* stored = row + l.scales_offset + 4 * first;
    for (; b + 4 <= count; b += 4) memcpy(value + b, stored + 4 * b, 16);
    for (; b < count; ++b) memcpy(value + b, stored + 4 * b, 4);
  }
}

}  // namespace
}  // namespace halfbyte::cpu
