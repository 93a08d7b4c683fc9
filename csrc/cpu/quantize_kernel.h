// quantize: float rows -> packed rows, byte-exact to docs/formats.md. Included once per ISA.
#pragma once

#include "kernels.h"

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

// NaN if any element is NaN or Inf. Integer maximum of |bits|: non-finite values sort above every finite one.
template <class T>
inline float block_absmax(const T* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = float_bits(to_float(x[i])) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest >= 0x7F800000u ? bits_float(kNaNBits) : bits_float(largest);
}

// The scale a block is stored with: its absmax or the given one; NaN marks a block that cannot be represented.
template <class T>
inline float block_scale(const T* x, int64_t count, const float* given) {
  const float absmax = block_absmax(x, count);
  if (!given || absmax != absmax) return absmax;
  return *given >= 0.0f && is_finite(*given) ? *given : bits_float(kNaNBits);
}

// v = x * (1 / scale), or x / scale where the reciprocal overflows (subnormal scales).
struct Normalizer {
  float reciprocal, scale;
  bool divide;
  explicit Normalizer(float s) : reciprocal(1.0f / s), scale(s), divide(!is_finite(1.0f / s)) {}
  float operator()(float x) const { return divide ? x / scale : x * reciprocal; }
};

// Nibbles of one block of `count` elements, starting at an even element; first element in the high nibble.
template <class T, bool FP4>
inline void encode_block(const T* x, int64_t count, float scale, uint8_t* codes) {
  constexpr uint8_t kZero = FP4 ? 0 : 7;
  if (scale != scale || scale == 0.0f) {
    memset(codes, kZero << 4 | kZero, size_t(count + 1) / 2);
    return;
  }
  const Normalizer normalize(scale);
  const auto encode = [&](T value) {
    const float v = normalize(to_float(value));
    return FP4 ? encode_fp4(v) : encode_nf4(v);
  };
  int64_t i = 0;
  for (; i + 1 < count; i += 2) codes[i / 2] = uint8_t(encode(x[i]) << 4 | encode(x[i + 1]));
  if (i < count) codes[i / 2] = uint8_t(encode(x[i]) << 4 | kZero);
}

template <class T, bool FP4>
inline void quantize_row_4bit(const T* x, const float* given, const RowLayout& l, uint8_t* row) {
  for (int64_t b = 0; b < l.num_blocks; ++b) {
    const int64_t start = b * l.block_size;
    const int64_t count = start + l.block_size < l.in_features ? l.block_size : l.in_features - start;
    const float scale = block_scale(x + start, count, given ? given + b : nullptr);
    memcpy(row + l.scales_offset + 4 * b, &scale, 4);
    encode_block<T, FP4>(x + start, count, scale, row + start / 2);
  }
}

// Scales of a -dq row as uint8 steps between the row's smallest and largest absmax.
template <class T, bool FP4>
inline void quantize_row_dq(const T* x, const float* given, const RowLayout& l, uint8_t* row) {
  float low = 0.0f, high = 0.0f;
  bool valid = true;
  const auto scale_of = [&](int64_t b, int64_t& start, int64_t& count) {
    start = b * l.block_size;
    count = start + l.block_size < l.in_features ? l.block_size : l.in_features - start;
    return block_scale(x + start, count, given ? given + b : nullptr);
  };
  int64_t start, count;
  for (int64_t b = 0; b < l.num_blocks; ++b) {
    const float scale = scale_of(b, start, count);
    valid = valid && scale == scale;
    low = b == 0 || scale < low ? scale : low;
    high = b == 0 || scale > high ? scale : high;
  }
  float step = (high - low) / 255.0f;
  if (!valid) {
    step = low = bits_float(kNaNBits);
    const uint8_t zero = FP4 ? 0 : 7;
    memset(row, zero << 4 | zero, size_t(l.code_bytes));
    memset(row + l.code_bytes, 0, size_t(l.num_blocks));
  } else {
    for (int64_t b = 0; b < l.num_blocks; ++b) {
      const float scale = scale_of(b, start, count);
      const float u = step == 0.0f ? 0.0f : rintf((scale - low) / step);
      row[l.code_bytes + b] = uint8_t(u < 255.0f ? u : 255.0f);
      encode_block<T, FP4>(x + start, count, scale, row + start / 2);
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
  if (scale != scale || scale == 0.0f) {
    memset(row, 0, size_t(l.in_features));
    return;
  }
  const float factor = (1.0f / scale) * kLimit;
  const bool divide = !is_finite(factor);
  for (int64_t i = 0; i < l.in_features; ++i) {
    const float value = to_float(x[i]);
    const float v = divide ? (value / scale) * kLimit : value * factor;
    if (FP8) {
      row[i] = float_to_fp8(v);
    } else {
      const float q = rintf(v);
      row[i] = uint8_t(int8_t(q > kLimit ? kLimit : q < -kLimit ? -kLimit : q));
    }
  }
}

template <class T>
void quantize_rows_of(const T* x, const float* scales, int64_t rows, const RowLayout& l, uint8_t* packed) {
  for (int64_t r = 0; r < rows; ++r, x += l.in_features, packed += l.row_bytes) {
    const float* given = scales ? scales + r * l.num_blocks : nullptr;
    // Zero what neither codes nor scales cover: the gap to 4 bytes and the padding to 16.
    const int64_t codes_end = l.code_bytes + (is_double_quantized(l.format) ? l.num_blocks : 0);
    memset(packed + codes_end, 0, size_t(l.row_bytes - codes_end));
    switch (l.format) {
      case kNF4: quantize_row_4bit<T, false>(x, given, l, packed); break;
      case kFP4: quantize_row_4bit<T, true>(x, given, l, packed); break;
      case kNF4DQ: quantize_row_dq<T, false>(x, given, l, packed); break;
      case kFP4DQ: quantize_row_dq<T, true>(x, given, l, packed); break;
      case kInt8: quantize_row_8bit<T, false>(x, given, l, packed); break;
      default: quantize_row_8bit<T, true>(x, given, l, packed); break;
    }
  }
}

void quantize_rows(const void* input, DType dtype, const float* scales, int64_t rows, const RowLayout& layout,
                   uint8_t* packed) {
  switch (dtype) {
    case DType::kFloat32: quantize_rows_of(static_cast<const float*>(input), scales, rows, layout, packed); break;
    case DType::kBFloat16: quantize_rows_of(static_cast<const BFloat16*>(input), scales, rows, layout, packed); break;
    case DType::kFloat16: quantize_rows_of(static_cast<const Float16*>(input), scales, rows, layout, packed); break;
  }
}

}  // namespace
}  // namespace halfbyte::cpu
