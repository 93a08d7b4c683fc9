// quantize: float rows -> packed rows, byte-exact to docs/formats.md. Included once per ISA: groups of 32 elements take its vectors,
// the last ones too: a group that overlaps the one before, or has zeros behind it. Blocks of unusual scales take the plain C++ that
// they equal bit for bit.
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

#if defined(__AVX512F__)
#include "quantize_avx512.h"
#elif defined(__AVX2__)
#include "quantize_avx2.h"
#else
#include "quantize_scalar.h"
#endif

namespace halfbyte::cpu {
namespace {

// Fewer elements than a group, and zeros behind them.
template <class T>
struct PaddedGroup {
  alignas(64) T elements[kEncodeGroup] = {};
  PaddedGroup(const T* x, int64_t count) { memcpy(elements, x, size_t(count) * sizeof(T)); }
};

// magnitude_max of any count.
template <class T>
inline uint32_t largest_magnitude(const T* x, int64_t count) {
  const int64_t full = count / kEncodeGroup * kEncodeGroup;
  uint32_t largest = magnitude_max(x, full);
  if (full < count) {
    const uint32_t rest = full > 0 ? magnitude_max(x + count - kEncodeGroup, kEncodeGroup)
                                   : magnitude_max(PaddedGroup<T>(x, count).elements, kEncodeGroup);
    largest = rest > largest ? rest : largest;
  }
  return largest;
}

// The scale a block is stored with: its absmax or the given one; NaN marks a block that cannot be represented, as one that holds
// NaN or Inf.
template <class T, bool Given>
inline float block_scale(uint32_t largest, const float* given) {
  const float absmax = to_float(value_of<T>(largest)), nan = bits_float(kNaNBits);
  if (!is_finite(absmax)) return nan;
  if (!Given) return absmax;
  if (*given == 0.0f) return 0.0f;  // -0 too
  return *given > 0.0f && is_finite(*given) ? *given : nan;
}

// Nibbles of `count` elements from an even one on, first element in the high nibble, the nibble after the last one that of 0: for
// scales without a finite reciprocal.
template <class T, bool FP4>
[[gnu::noinline]] void encode_elements(const T* x, int64_t count, float scale, uint8_t* codes) {
  constexpr uint8_t kZero = FP4 ? 0 : 7;
  if (scale != scale || scale == 0.0f) {
    memset(codes, kZero << 4 | kZero, size_t(count + 1) / 2);
    return;
  }
  const auto encode = [&](T value) {
    const float v = to_float(value) / scale;
    return FP4 ? encode_fp4(v) : encode_nf4(v);
  };
  int64_t i = 0;
  for (; i + 1 < count; i += 2) codes[i / 2] = uint8_t(encode(x[i]) << 4 | encode(x[i + 1]));
  if (i < count) codes[i / 2] = uint8_t(encode(x[i]) << 4 | kZero);
}

// Codes of a block that ends within a group.
template <class T, bool FP4, bool Beyond>
[[gnu::noinline]] void encode_rest(const T* x, int64_t count, float scale, uint8_t* codes) {
  const float reciprocal = 1.0f / scale;
  if (!is_finite(reciprocal)) return encode_elements<T, FP4>(x, count, scale, codes);
  int64_t i = 0;
  for (; i + kEncodeGroup <= count; i += kEncodeGroup) encode_4bit<T, FP4, Beyond>(x + i, reciprocal, codes + i / 2);
  if (i == count) return;
  if (i > 0 && count % 2 == 0) {
    i = count - kEncodeGroup;
    encode_4bit<T, FP4, Beyond>(x + i, reciprocal, codes + i / 2);
    return;
  }
  uint8_t bytes[kEncodeGroup / 2];
  encode_4bit<T, FP4, Beyond>(PaddedGroup<T>(x + i, count - i).elements, reciprocal, bytes);
  memcpy(codes + i / 2, bytes, size_t(count - i + 1) / 2);
}

// Blocks whose scales are found before their codes: several, because the latencies of finding one scale (a reduction and a
// division) are longer than encoding a block of 64; few, so that they are still in L1.
constexpr int64_t kBlocksAtOnce = 16;

// How many of the blocks first..first + blocks are whole: all, or all but the row's last one.
inline int64_t whole_blocks(const RowLayout& l, int64_t first, int64_t blocks) {
  return (first + blocks) * l.block_size <= l.in_features ? blocks : blocks - 1;
}

// Scales of blocks first..first + blocks, at most kBlocksAtOnce. Size: that of blocks, 0 where it is not known.
template <class T, bool Given, int64_t Size>
inline void scale_blocks(const T* x, const float* given, const RowLayout& l, int64_t first, int64_t blocks, float* scales) {
  const int64_t size = Size ? Size : l.block_size, whole = whole_blocks(l, first, blocks);
  uint32_t largest[kBlocksAtOnce];
  const T* block = x + first * size;
  for (int64_t b = 0; b < whole; ++b, block += size) largest[b] = magnitude_max(block, size);
  if (whole < blocks) [[unlikely]]
    largest[whole] = largest_magnitude(block, x + l.in_features - block);
  for (int64_t b = 0; b < blocks; ++b) scales[b] = block_scale<T, Given>(largest[b], Given ? given + first + b : nullptr);
}

// The elements of one group, fetched while others are encoded: scales are found in bursts of reads, and memory would idle between.
template <class T>
inline void fetch_group(const T* x) {
  for (int64_t i = 0; i < kEncodeGroup; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(x + i);
}

// Codes of blocks first..first + blocks, at most kBlocksAtOnce. Beyond: elements may be larger than their scale. `ahead`: elements
// from here to those whose scales are found next.
template <class T, bool FP4, bool Beyond, int64_t Size>
inline void encode_blocks(const T* x, const RowLayout& l, int64_t first, int64_t blocks, const float* scales, int64_t ahead,
                          uint8_t* row) {
  const int64_t size = Size ? Size : l.block_size, whole = whole_blocks(l, first, blocks);
  float reciprocals[kBlocksAtOnce];
  for (int64_t b = 0; b < blocks; ++b) reciprocals[b] = 1.0f / scales[b];
  const T* element = x + first * size;
  uint8_t* codes = row + first * size / 2;
  for (int64_t b = 0; b < whole; ++b, element += size, codes += size / 2) {
    if (!is_finite(reciprocals[b])) [[unlikely]] {  // a scale that is NaN, 0 or below 2^-128
      encode_elements<T, FP4>(element, size, scales[b], codes);
      continue;
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < size; i += kEncodeGroup) {
      fetch_group(element + i + ahead);
      encode_4bit<T, FP4, Beyond>(element + i, reciprocals[b], codes + i / 2);
    }
  }
  if (whole < blocks) [[unlikely]]
    encode_rest<T, FP4, Beyond>(element, x + l.in_features - element, scales[whole], codes);
}

// Calls f(first, blocks) for all blocks of a row, in order.
template <class F>
inline void for_blocks(const RowLayout& l, F f) {
  const int64_t at_once = l.block_size < 1024 ? kBlocksAtOnce : 1;
  for (int64_t first = 0; first < l.num_blocks; first += at_once)
    f(first, first + at_once < l.num_blocks ? at_once : l.num_blocks - first);
}

template <class T, bool FP4, bool Given, int64_t Size>
inline void quantize_row_absmax(const T* x, const float* given, const RowLayout& l, uint8_t* row) {
  for_blocks(l, [&](int64_t first, int64_t blocks) {
    float scales[kBlocksAtOnce];
    scale_blocks<T, Given, Size>(x, given, l, first, blocks, scales);
    memcpy(row + l.scales_offset + 4 * first, scales, size_t(4 * blocks));
    encode_blocks<T, FP4, Given, Size>(x, l, first, blocks, scales, blocks * l.block_size, row);
  });
}

// Scales of a -dq row as uint8 steps between the row's smallest and largest absmax.
template <class T, bool FP4, bool Given, int64_t Size>
inline void quantize_row_dq(const T* x, const float* given, const RowLayout& l, uint8_t* row) {
  constexpr int64_t kKept = 1024;  // rows of more blocks find their scales twice
  float kept[kKept], found[kBlocksAtOnce];
  const bool all = l.num_blocks <= kKept;
  const auto scales_of = [&](int64_t first) { return all ? kept + first : found; };
  uint32_t least = ~0u, most = 0;  // bits of scales: ordered like them, NaN above all
  for_blocks(l, [&](int64_t first, int64_t blocks) {
    float* scales = scales_of(first);
    scale_blocks<T, Given, Size>(x, given, l, first, blocks, scales);
    for (int64_t b = 0; b < blocks; ++b) {
      const uint32_t bits = float_bits(scales[b]);
      least = bits < least ? bits : least;
      most = bits > most ? bits : most;
    }
  });
  float low = bits_float(least), step = (bits_float(most) - low) / 255.0f;
  if (!is_finite(bits_float(most))) [[unlikely]] {
    constexpr uint8_t kZero = FP4 ? 0 : 7;
    step = low = bits_float(kNaNBits);
    memset(row, kZero << 4 | kZero, size_t(l.code_bytes));
    memset(row + l.code_bytes, 0, size_t(l.num_blocks));
  } else {
    for_blocks(l, [&, low, step](int64_t first, int64_t blocks) {
      float* scales = scales_of(first);
      if (!all) scale_blocks<T, Given, Size>(x, given, l, first, blocks, scales);
      uint8_t steps[kBlocksAtOnce];
      for (int64_t b = 0; b < blocks; ++b) {
        const float u = step == 0.0f ? 0.0f : rintf((scales[b] - low) / step);
        steps[b] = uint8_t(int(u < 255.0f ? u : 255.0f));
      }
      memcpy(row + l.code_bytes + first, steps, size_t(blocks));
      encode_blocks<T, FP4, Given, Size>(x, l, first, blocks, scales, l.in_features, row);
    });
  }
  memcpy(row + l.scales_offset, &step, 4);
  memcpy(row + l.scales_offset + 4, &low, 4);
}

template <class T, bool FP4, bool Given>
inline void quantize_row_4bit(const T* x, const float* given, const RowLayout& l, uint8_t* row) {
  const auto quantize = [&]<int64_t Size>() {
    if (is_double_quantized(l.format)) {
      quantize_row_dq<T, FP4, Given, Size>(x, given, l, row);
    } else {
      quantize_row_absmax<T, FP4, Given, Size>(x, given, l, row);
    }
  };
  if (l.block_size == 64) {  // as nearly always: a loop of two steps, which the compiler unrolls
    quantize.template operator()<64>();
  } else {
    quantize.template operator()<0>();
  }
}

// int8 and fp8: x * ((1 / absmax) * limit), or (x / absmax) * limit where the factor is not finite.
template <class T, bool FP8, bool Given>
inline void quantize_row_8bit(const T* x, const float* given, const RowLayout& l, uint8_t* row) {
  constexpr float kLimit = FP8 ? kFP8Max : kInt8Max;
  const float scale = block_scale<T, Given>(largest_magnitude(x, l.in_features), given);
  memcpy(row + l.scales_offset, &scale, 4);
  if (scale != scale || scale == 0.0f) [[unlikely]] {
    memset(row, 0, size_t(l.in_features));
    return;
  }
  const float factor = (1.0f / scale) * kLimit;
  if (!is_finite(factor)) [[unlikely]] {
    for (int64_t i = 0; i < l.in_features; ++i) {
      const float v = (to_float(x[i]) / scale) * kLimit;
      row[i] = FP8 ? float_to_fp8(v) : float_to_int8(v);
    }
    return;
  }
  int64_t i = 0;
  for (; i + kEncodeGroup <= l.in_features; i += kEncodeGroup) {
    fetch_group(x + i + l.in_features);
    encode_8bit<T, FP8, Given>(x + i, factor, row + i);
  }
  if (i == l.in_features) return;
  if (i > 0) {
    const int64_t start = l.in_features - kEncodeGroup;
    encode_8bit<T, FP8, Given>(x + start, factor, row + start);
  } else {
    uint8_t bytes[kEncodeGroup];
    encode_8bit<T, FP8, Given>(PaddedGroup<T>(x, l.in_features).elements, factor, bytes);
    memcpy(row, bytes, size_t(l.in_features));
  }
}

template <class T, bool Given>
inline void quantize_row(const T* x, const float* given, const RowLayout& l, uint8_t* row) {
  // Zero what neither codes nor scales cover: the gap to 4 bytes and the padding to 16.
  const int64_t codes_end = l.code_bytes + (is_double_quantized(l.format) ? l.num_blocks : 0);
  memset(row + codes_end, 0, size_t(l.row_bytes - codes_end));
  switch (l.format) {
    case kNF4: case kNF4DQ: quantize_row_4bit<T, false, Given>(x, given, l, row); break;
    case kFP4: case kFP4DQ: quantize_row_4bit<T, true, Given>(x, given, l, row); break;
    case kInt8: quantize_row_8bit<T, false, Given>(x, given, l, row); break;
    default: quantize_row_8bit<T, true, Given>(x, given, l, row); break;
  }
}

// Packed rows go through the caches: streaming them measured 10 % slower (they are a fifth of the bytes moved).
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
