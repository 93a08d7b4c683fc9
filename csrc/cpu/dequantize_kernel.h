// dequantize: packed rows -> float rows. One fp32 product, one rounding to the output type. Included once per ISA.
#pragma once

#include "kernels.h"

namespace halfbyte::cpu {
namespace {

// absmax of block b of a 4-bit row.
inline float stored_absmax(const uint8_t* row, const RowLayout& l, int64_t b) {
  float value;
  if (!is_double_quantized(l.format)) {
    memcpy(&value, row + l.scales_offset + 4 * b, 4);
    return value;
  }
  float step, low;
  memcpy(&step, row + l.scales_offset, 4);
  memcpy(&low, row + l.scales_offset + 4, 4);
  return fmaf(float(row[l.code_bytes + b]), step, low);
}

template <class T>
inline void dequantize_row_4bit(const uint8_t* row, const RowLayout& l, T* out) {
  const float* values = codebook(l.format);
  for (int64_t b = 0; b < l.num_blocks; ++b) {
    const int64_t start = b * l.block_size;
    const int64_t end = start + l.block_size < l.in_features ? start + l.block_size : l.in_features;
    const float absmax = stored_absmax(row, l, b);
    T table[16];
    for (int c = 0; c < 16; ++c) table[c] = from_float<T>(values[c] * absmax);
    int64_t i = start;
    for (; i + 1 < end; i += 2) {
      const uint8_t byte = row[i / 2];
      out[i] = table[byte >> 4];
      out[i + 1] = table[byte & 15];
    }
    if (i < end) out[i] = table[row[i / 2] >> 4];
  }
}

template <class T, bool FP8>
inline void dequantize_row_8bit(const uint8_t* row, const RowLayout& l, T* out) {
  float absmax;
  memcpy(&absmax, row + l.scales_offset, 4);
  const float quotient = absmax / (FP8 ? kFP8Max : kInt8Max);
  for (int64_t i = 0; i < l.in_features; ++i)
    out[i] = from_float<T>((FP8 ? fp8_to_float(row[i]) : float(int8_t(row[i]))) * quotient);
}

template <class T>
void dequantize_rows_to(const uint8_t* packed, int64_t rows, const RowLayout& l, T* out) {
  for (int64_t r = 0; r < rows; ++r, packed += l.row_bytes, out += l.in_features) {
    if (is_4bit(l.format)) {
      dequantize_row_4bit(packed, l, out);
    } else if (l.format == kInt8) {
      dequantize_row_8bit<T, false>(packed, l, out);
    } else {
      dequantize_row_8bit<T, true>(packed, l, out);
    }
  }
}

void dequantize_rows(const uint8_t* packed, int64_t rows, const RowLayout& layout, DType dtype, void* output,
                     bool /*stream*/) {
  switch (dtype) {
    case DType::kFloat32: dequantize_rows_to(packed, rows, layout, static_cast<float*>(output)); break;
    case DType::kBFloat16: dequantize_rows_to(packed, rows, layout, static_cast<BFloat16*>(output)); break;
    case DType::kFloat16: dequantize_rows_to(packed, rows, layout, static_cast<Float16*>(output)); break;
  }
}

}  // namespace
}  // namespace halfbyte::cpu
