// What dequantize_kernel.h needs of an ISA, in plain C++: the form the other ISAs must equal bit for bit.
#pragma once

#include "kernels.h"
#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

constexpr int64_t kDecodeGroup = 32;  // elements per call of decode and decode_8bit

// The 16 values of a 4-bit codebook times a block's absmax, rounded to T once.
template <class T>
struct ScaledCodebook {
  T entry[16];

  ScaledCodebook(const float* codebook, float absmax) {
    for (int c = 0; c < 16; ++c) entry[c] = from_float<T>(codebook[c] * absmax);
  }

  // 16 bytes of codes -> 32 elements.
  template <bool Stream>
  void decode(const uint8_t* codes, T* out) const {
    for (int i = 0; i < 16; ++i) {
      out[2 * i] = entry[codes[i] >> 4];
      out[2 * i + 1] = entry[codes[i] & 15];
    }
  }
};

// 32 int8 or e4m3 codes -> code * quotient.
template <class T, bool FP8, bool Stream>
inline void decode_8bit(const uint8_t* codes, float quotient, T* out) {
  for (int i = 0; i < kDecodeGroup; ++i)
    out[i] = from_float<T>((FP8 ? fp8_to_float(codes[i]) : float(int8_t(codes[i]))) * quotient);
}

}  // namespace
}  // namespace halfbyte::cpu
