// What quantize_kernel.h needs of an ISA, in plain C++: the form the other ISAs must equal bit for bit.
#pragma once

#include "kernels.h"
#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

constexpr int64_t kEncodeGroup = 32;  // elements per call of encode_4bit and encode_8bit; magnitude_max takes multiples

// Largest magnitude_bits of `count` elements.
template <class T>
inline uint32_t magnitude_max(const T* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = magnitude_bits(x[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// 32 elements -> 16 bytes of codes of x * reciprocal. Beyond: the products may lie outside [-1, 1].
template <class T, bool FP4, bool Beyond>
inline void encode_4bit(const T* x, float reciprocal, uint8_t* codes) {
  const auto encode = [&](T value) {
    const float v = to_float(value) * reciprocal;
    return FP4 ? encode_fp4(v) : encode_nf4(v);
  };
  for (int i = 0; i < 16; ++i) codes[i] = uint8_t(encode(x[2 * i]) << 4 | encode(x[2 * i + 1]));
}

// 32 elements -> 32 codes of x * factor.
template <class T, bool FP8, bool /*Beyond*/>
inline void encode_8bit(const T* x, float factor, uint8_t* codes) {
  for (int i = 0; i < kEncodeGroup; ++i) {
    const float v = to_float(x[i]) * factor;
    codes[i] = FP8 ? float_to_fp8(v) : float_to_int8(v);
  }
}

}  // namespace
}  // namespace halfbyte::cpu
