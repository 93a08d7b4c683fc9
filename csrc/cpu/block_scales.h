// Scales of 4-bit blocks as floats. Included once per ISA.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels.h"
#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

// absmax of blocks [first, first + count) of a 4-bit row; `value` has room for a multiple of 8.
inline void load_block_scales(const uint8_t* row, const RowLayout& l, int64_t first, int64_t count, float* value) {
  int64_t b = 0;
  if (is_double_quantized(l.format)) {
    float step, low;
    memcpy(&step, row + l.scales_offset, 4);
    memcpy(&low, row + l.scales_offset + 4, 4);
    const uint8_t* codes = row + l.code_bytes + first;
#if defined(__AVX2__)
    const __m256 steps = _mm256_set1_ps(step), lows = _mm256_set1_ps(low);
    for (; b < count; b += 8) {  // past the last code there are step and low: 8 bytes of the row
      const __m256i run = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + b)));
      _mm256_storeu_ps(value + b, _mm256_fmadd_ps(_mm256_cvtepi32_ps(run), steps, lows));
    }
#else
    for (; b < count; ++b) value[b] = fmaf(float(codes[b]), step, low);
#endif
  } else {
    const uint8_t* stored = row + l.scales_offset + 4 * first;
    for (; b + 4 <= count; b += 4) {
      memcpy(value + b, stored + 4 * b, 16);
      asm volatile("" : :);  // of such a loop GCC makes a call of memcpy, and a caller's vectors leave their registers
    }
    for (; b < count; ++b) memcpy(value + b, stored + 4 * b, 4);
  }
}

}  // namespace
}  // namespace halfbyte::cpu
