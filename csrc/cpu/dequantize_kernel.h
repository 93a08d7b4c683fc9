// dequantize: packed rows -> float rows. One fp32 product, one rounding to the output type. Included once per ISA: full
// groups of 32 elements take its vectors, the rest of a block the plain C++ that they equal bit for bit.
#pragma once

#include "block_scales.h"
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

// Whole blocks of `groups` x kDecodeGroup elements; kGroups: their number, where it is known, else 0.
template <class T, bool Stream, int kGroups>
inline void decode_blocks(const uint8_t* codes, int64_t blocks, int64_t groups, const float* values, const float* absmax, T* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    const ScaledCodebook<T> table(values, absmax[b]);
    for (int64_t g = 0; g < (kGroups ? kGroups : groups); ++g, codes += kDecodeGroup / 2, out += kDecodeGroup)
      table.template decode<Stream>(codes, out);
  }
}

template <class T, bool Stream>
inline void dequantize_4bit(const uint8_t* row, const RowLayout& l, int64_t begin, int64_t end, T* out) {
  constexpr int64_t kRun = 64;  // blocks whose scales are loaded together
  const float* values = codebook(l.format);
  const int log2_block = __builtin_ctzll(uint64_t(l.block_size));  // shifts: a division costs as much as decoding 64 elements
  float absmax[kRun];
  for (int64_t start = begin; start < end; start += kRun << log2_block) {
    const int64_t stop = start + (kRun << log2_block) < end ? start + (kRun << log2_block) : end;
    const int64_t whole = (stop - start) >> log2_block, all = (stop - start + l.block_size - 1) >> log2_block;
    load_block_scales(row, l, start >> log2_block, all, absmax);
    for (int64_t b = 0; b < all; ++b) absmax[b] = canonical_nan(absmax[b]);
    const uint8_t* codes = row + start / 2;
    T* to = out + (start - begin);
    switch (l.block_size / kDecodeGroup) {
      case 1: decode_blocks<T, Stream, 1>(codes, whole, 1, values, absmax, to); break;
      case 2: decode_blocks<T, Stream, 2>(codes, whole, 2, values, absmax, to); break;
      default: decode_blocks<T, Stream, 0>(codes, whole, l.block_size / kDecodeGroup, values, absmax, to);
    }
    if (whole == all) continue;
    // The row's last block is not a whole one.
    int64_t i = start + (whole << log2_block);
    const int64_t groups = (stop - i) / kDecodeGroup;
    decode_blocks<T, Stream, 0>(row + i / 2, 1, groups, values, absmax + whole, out + (i - begin));
    for (i += groups * kDecodeGroup; i < stop; ++i) {
      const uint8_t code = i % 2 ? row[i / 2] & 15 : row[i / 2] >> 4;
      out[i - begin] = from_float<T>(values[code] * absmax[whole]);
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

// Codes and scales are streams that stop and start again, too short for the hardware to see in time: 4-bit rows are fetched whole, of
// others and of long ones the scales. To L2: what is on its way to L1 takes the line buffers that stores need. Always inline: GCC drops
// calls of a function that does nothing but prefetch.
[[gnu::always_inline]] inline void prefetch_row(const uint8_t* row, const RowLayout& l) {
  constexpr int64_t kMost = 8192;
  const int64_t scales = is_double_quantized(l.format) ? l.code_bytes : l.scales_offset;
  const int64_t begin = is_4bit(l.format) && l.row_bytes <= kMost ? 0 : scales;
  const int64_t end = l.row_bytes - begin < kMost ? l.row_bytes : begin + kMost;
  for (int64_t byte = begin; byte < end; byte += 64) __builtin_prefetch(row + byte, 0, 2);
}

template <class T>
[[gnu::noinline]] void dequantize_rows_to(const uint8_t* packed, int64_t rows, const RowLayout& l, T* out, bool stream) {
  for (int64_t r = 0; r < rows; ++r, packed += l.row_bytes, out += l.in_features) {
    if (r + 1 < rows) prefetch_row(packed + l.row_bytes, l);
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
