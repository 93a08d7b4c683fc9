// dequantize: packed rows -> float rows. One fp32 product, one rounding to the output type. Included once per ISA: full
// groups of 32 elements take its vectors, the rest of a block the plain C++ that they equal bit for bit.
#pragma once

#include "kernels.h"
#include "simd/float_mode.h"

#if defined(__AVX512F__)
#include "dequantize_avx512.h"
#elif defined(__AVX2__)
#include "dequantize_avx2.h"
#else
#include "dequantize_scalar.h"
#endif

namespace halfbyte::cpu {
namespace {

// One kind of NaN: the roundings to bf16 rely on it, and a scale may come from any file.
inline float canonical_nan(float value) { return value == value ? value : bits_float(kNaNBits); }

// absmax of block b of a 4-bit row.
inline float stored_absmax(const uint8_t* row, const RowLayout& l, int64_t b) {
  float value;
  if (!is_double_quantized(l.format)) {
    memcpy(&value, row + l.scales_offset + 4 * b, 4);
    return canonical_nan(value);
  }
  float step, low;
  memcpy(&step, row + l.scales_offset, 4);
  memcpy(&low, row + l.scales_offset + 4, 4);
  return canonical_nan(fmaf(float(row[l.code_bytes + b]), step, low));
}

template <class T, bool Stream>
inline void dequantize_4bit(const uint8_t* row, const RowLayout& l, int64_t begin, int64_t end, T* out) {
  const float* values = codebook(l.format);
  for (int64_t start = begin; start < end; start += l.block_size) {
    const int64_t stop = start + l.block_size < end ? start + l.block_size : end;
    const float absmax = stored_absmax(row, l, start / l.block_size);
    const ScaledCodebook<T> table(values, absmax);
    int64_t i = start;
    for (; i + kDecodeGroup <= stop; i += kDecodeGroup) table.template decode<Stream>(row + i / 2, out + (i - begin));
    for (; i < stop; ++i) {
      const uint8_t code = i % 2 ? row[i / 2] & 15 : row[i / 2] >> 4;
      out[i - begin] = from_float<T>(values[code] * absmax);
    }
  }
}

template <class T, bool FP8, bool Stream>
inline void dequantize_8bit(const uint8_t* row, const RowLayout& l, int64_t begin, int64_t end, T* out) {
  float absmax;
  memcpy(&absmax, row + l.scales_offset, 4);
  const float quotient = canonical_nan(absmax / (FP8 ? kFP8Max : kInt8Max));
  int64_t i = begin;
  for (; i + kDecodeGroup <= end; i += kDecodeGroup) decode_8bit<T, FP8, Stream>(row + i, quotient, out + (i - begin));
  for (; i < end; ++i)
    out[i - begin] = from_float<T>((FP8 ? fp8_to_float(row[i]) : float(int8_t(row[i]))) * quotient);
}

// Elements begin..end of one row; begin is a multiple of the block size.
template <class T, bool Stream>
inline void dequantize_span(const uint8_t* row, const RowLayout& l, int64_t begin, int64_t end, T* out) {
  if (is_4bit(l.format)) {
    dequantize_4bit<T, Stream>(row, l, begin, end, out);
  } else if (l.format == kInt8) {
    dequantize_8bit<T, false, Stream>(row, l, begin, end, out);
  } else {
    dequantize_8bit<T, true, Stream>(row, l, begin, end, out);
  }
}

// A row that starts anywhere (odd K): through a buffer that stays in L1. 4096 is a multiple of every block size.
template <class T>
inline void dequantize_unaligned_stream(const uint8_t* row, const RowLayout& l, T* out) {
  constexpr int64_t kChunk = 4096;
  alignas(64) T buffer[kChunk];
  for (int64_t begin = 0; begin < l.in_features; begin += kChunk) {
    const int64_t end = begin + kChunk < l.in_features ? begin + kChunk : l.in_features;
    dequantize_span<T, false>(row, l, begin, end, buffer);
    stream_copy(out + begin, buffer, (end - begin) * int64_t(sizeof(T)));
  }
}

// The scales of a row are a few cache lines far from its codes: too short a stream for the hardware to see in time.
inline void prefetch_scales(const uint8_t* row, const RowLayout& l) {
  constexpr int64_t kMost = 2048;  // longer streams are seen
  const int64_t begin = is_double_quantized(l.format) ? l.code_bytes : l.scales_offset;
  const int64_t end = l.row_bytes - begin < kMost ? l.row_bytes : begin + kMost;
  for (int64_t byte = begin; byte < end; byte += 64) __builtin_prefetch(row + byte);
}

template <class T>
[[gnu::noinline]] void dequantize_rows_to(const uint8_t* packed, int64_t rows, const RowLayout& l, T* out, bool stream) {
  for (int64_t r = 0; r < rows; ++r, packed += l.row_bytes, out += l.in_features) {
    if (r + 1 < rows) prefetch_scales(packed + l.row_bytes, l);
    if (!stream) {
      dequantize_span<T, false>(packed, l, 0, l.in_features, out);
    } else if (reinterpret_cast<uintptr_t>(out) % kStreamAlignment == 0) {
      dequantize_span<T, true>(packed, l, 0, l.in_features, out);
    } else {
      dequantize_unaligned_stream(packed, l, out);
    }
  }
  if (stream) stream_fence();  // non-temporal stores must be visible before another thread is told that they are done
}

void dequantize_rows(const uint8_t* packed, int64_t rows, const RowLayout& layout, DType dtype, void* output, bool stream) {
  const IEEEFloats mode;
  switch (dtype) {
    case DType::kFloat32: dequantize_rows_to(packed, rows, layout, static_cast<float*>(output), stream); break;
    case DType::kBFloat16: dequantize_rows_to(packed, rows, layout, static_cast<BFloat16*>(output), stream); break;
    case DType::kFloat16: dequantize_rows_to(packed, rows, layout, static_cast<Float16*>(output), stream); break;
  }
}

}  // namespace
}  // namespace halfbyte::cpu
