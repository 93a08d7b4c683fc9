// quantize: float rows -> packed rows, byte-exact to docs/formats.md. Included once per ISA: full groups of 32 elements
// take its vectors, the rest of a block the plain C++ that they equal bit for bit.
#pragma once

#include "kernels.h"
#include "simd/float_mode.h"
#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

inline uint8_t encode_nf4(float v) {
  int code = 0;
  for (int i = 0; i < 15; ++i) code += v > kNF4Thresholds.value[i];
  return uint8_t(code);
}

inline uint8_t encode_fp4(float v) {
  const float magnitude = fabsf(v);
  int rank = 0;
  for (int i = 0; i < 7; ++i) rank += magnitude > kFP4Thresholds.value[i];
  const uint8_t code = kFP4Ascending[rank];
  return uint8_t(code | (v < 0.0f && code != 0 ? 8 : 0));
}

inline uint8_t float_to_int8(float v) {
  const float q = rintf(v);
  return uint8_t(int8_t(q > kInt8Max ? kInt8Max : q < -kInt8Max ? -kInt8Max : q));
}

}  // namespace
}  // namespace halfbyte::cpu

#if defined(__AVX512VBMI__)
#include "quantize_avx512.h"
#elif defined(__AVX2__)
#include "quantize_avx2.h"
#else
#include "quantize_scalar.h"
#endif

namespace halfbyte::cpu {
namespace {

// NaN if any element is NaN or Inf.
template <class T>
inline float block_absmax(const T* x, int64_t count) {
  const int64_t full = count / kEncodeGroup * kEncodeGroup;
  uint32_t largest = magnitude_max(x, full);
  for (int64_t i = full; i < count; ++i) {
    const uint32_t magnitude = magnitude_bits(x[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  const float absmax = to_float(value_of<T>(largest));
  return is_finite(absmax) ? absmax : bits_float(kNaNBits);
}

// The scale a block is stored with: its absmax or the given one; NaN marks a block that cannot be represented.
template <class T>
inline float block_scale(const T* x, int64_t count, const float* given) {
  const float absmax = block_absmax(x, count);
  if (!given || absmax != absmax) return absmax;
  if (*given == 0.0f) return 0.0f;  // -0 too
  return *given > 0.0f && is_finite(*given) ? *given : bits_float(kNaNBits);
}

// Nibbles of one block of `count` elements, starting at an even element; first element in the high nibble.
// Beyond: elements may be larger than the scale.
template <class T, bool FP4, bool Beyond>
inline void encode_block(const T* x, int64_t count, float scale, uint8_t* codes) {
  constexpr uint8_t kZero = FP4 ? 0 : 7;
  if (scale != scale || scale == 0.0f) [[unlikely]] {
    memset(codes, kZero << 4 | kZero, size_t(count + 1) / 2);
    return;
  }
  const float reciprocal = 1.0f / scale;
  const bool divide = !is_finite(reciprocal);  // scales below 2^-128
  int64_t i = 0;
  if (!divide) [[likely]] {
    for (; i + kEncodeGroup <= count; i += kEncodeGroup) encode_4bit<T, FP4, Beyond>(x + i, reciprocal, codes + i / 2);
  }
  const auto encode = [&](T value) {
    const float v = divide ? to_float(value) / scale : to_float(value) * reciprocal;
    return FP4 ? encode_fp4(v) : encode_nf4(v);
  };
  for (; i + 1 < count; i += 2) codes[i / 2] = uint8_t(encode(x[i]) << 4 | encode(x[i + 1]));
  if (i < count) codes[i / 2] = uint8_t(encode(x[i]) << 4 | kZero);
}

template <class T, bool FP4, bool Given>
inline void quantize_row_4bit(const T* x, const float* given, const RowLayout& l, uint8_t* row) {
  for (int64_t b = 0; b < l.num_blocks; ++b) {
    const int64_t start = b * l.block_size;
    const int64_t count = start + l.block_size < l.in_features ? l.block_size : l.in_features - start;
    const float scale = block_scale(x + start, count, Given ? given + b : nullptr);
    memcpy(row + l.scales_offset + 4 * b, &scale, 4);
    encode_block<T, FP4, Given>(x + start, count, scale, row + start / 2);
  }
}

// Scales of a -dq row as uint8 steps between the row's smallest and largest absmax.
template <class T, bool FP4, bool Given>
inline void quantize_row_dq(const T* x, const float* given, const RowLayout& l, uint8_t* row) {
  constexpr int64_t kKept = 1024;  // scales kept from the first pass; those of longer rows are computed twice
  float kept[kKept];
  const auto count_of = [&](int64_t b) {
    const int64_t left = l.in_features - b * l.block_size;
    return left < l.block_size ? left : l.block_size;
  };
  const auto scale_of = [&](int64_t b) { return block_scale(x + b * l.block_size, count_of(b), Given ? given + b : nullptr); };
  float low = 0.0f, high = 0.0f;
  bool valid = true;
  for (int64_t b = 0; b < l.num_blocks; ++b) {
    const float scale = scale_of(b);
    if (b < kKept) kept[b] = scale;
    valid = valid && scale == scale;
    low = b == 0 || scale < low ? scale : low;
    high = b == 0 || scale > high ? scale : high;
  }
  float step = (high - low) / 255.0f;
  if (!valid) [[unlikely]] {
    constexpr uint8_t kZero = FP4 ? 0 : 7;
    step = low = bits_float(kNaNBits);
    memset(row, kZero << 4 | kZero, size_t(l.code_bytes));
    memset(row + l.code_bytes, 0, size_t(l.num_blocks));
  } else {
    for (int64_t b = 0; b < l.num_blocks; ++b) {
      const float scale = b < kKept ? kept[b] : scale_of(b);
      const float u = step == 0.0f ? 0.0f : rintf((scale - low) / step);
      row[l.code_bytes + b] = uint8_t(u < 255.0f ? u : 255.0f);
      encode_block<T, FP4, Given>(x + b * l.block_size, count_of(b), scale, row + b * l.block_size / 2);
    }
  }
  memcpy(row + l.scales_offset, &step, 4);
  memcpy(row + l.scales_offset + 4, &low, 4);
}

// int8 and fp8: x * ((1 / absmax) * limit), or (x / absmax) * limit where the factor is not finite.
template <class T, bool FP8>
inline void quantize_row_8bit(const T* x, const float* given, const RowLayout& l, uint8_t* row) {
  constexpr float kLimit = FP8 ? kFP8Max : kInt8Max;
  const float scale = block_scale(x, l.in_features, given);
  memcpy(row + l.scales_offset, &scale, 4);
  if (scale != scale || scale == 0.0f) [[unlikely]] {
    memset(row, 0, size_t(l.in_features));
    return;
  }
  const float factor = (1.0f / scale) * kLimit;
  const bool divide = !is_finite(factor);
  int64_t i = 0;
  if (!divide) [[likely]] {
    for (; i + kEncodeGroup <= l.in_features; i += kEncodeGroup) encode_8bit<T, FP8>(x + i, factor, row + i);
  }
  for (; i < l.in_features; ++i) {
    const float value = to_float(x[i]);
    const float v = divide ? (value / scale) * kLimit : value * factor;
    row[i] = FP8 ? float_to_fp8(v) : float_to_int8(v);
  }
}

template <class T, bool Given>
inline void quantize_row(const T* x, const float* given, const RowLayout& l, uint8_t* row) {
  // Zero what neither codes nor scales cover: the gap to 4 bytes and the padding to 16.
  const int64_t codes_end = l.code_bytes + (is_double_quantized(l.format) ? l.num_blocks : 0);
  memset(row + codes_end, 0, size_t(l.row_bytes - codes_end));
  switch (l.format) {
    case kNF4: quantize_row_4bit<T, false, Given>(x, given, l, row); break;
    case kFP4: quantize_row_4bit<T, true, Given>(x, given, l, row); break;
    case kNF4DQ: quantize_row_dq<T, false, Given>(x, given, l, row); break;
    case kFP4DQ: quantize_row_dq<T, true, Given>(x, given, l, row); break;
    case kInt8: quantize_row_8bit<T, false>(x, given, l, row); break;
    default: quantize_row_8bit<T, true>(x, given, l, row); break;
  }
}

template <class T>
[[gnu::noinline]] void quantize_rows_of(const T* x, const float* scales, int64_t rows, const RowLayout& l, uint8_t* packed) {
  for (int64_t r = 0; r < rows; ++r, x += l.in_features, packed += l.row_bytes) {
    if (scales) {
      quantize_row<T, true>(x, scales + r * l.num_blocks, l, packed);
    } else {
      quantize_row<T, false>(x, nullptr, l, packed);
    }
  }
}

void quantize_rows(const void* input, DType dtype, const float* scales, int64_t rows, const RowLayout& layout,
                   uint8_t* packed) {
  const IEEEFloats mode;
  switch (dtype) {
    case DType::kFloat32: quantize_rows_of(static_cast<const float*>(input), scales, rows, layout, packed); break;
    case DType::kBFloat16: quantize_rows_of(static_cast<const BFloat16*>(input), scales, rows, layout, packed); break;
    case DType::kFloat16: quantize_rows_of(static_cast<const Float16*>(input), scales, rows, layout, packed); break;
  }
}

}  // namespace
}  // namespace halfbyte::cpu
