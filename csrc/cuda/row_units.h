// What the kernels that quantize rows share: units of 8 elements as floats, and maxima over threads.
#pragma once

#include "elements.h"
#include "geometry.h"
#include "launch.h"

namespace halfbyte::cuda {

template <class T>
struct alignas(16) Vector16 {
  T value[16 / sizeof(T)];
};

// Elements of one unit as floats; missing ones are 0, which changes no absmax and is overwritten by no code.
template <class T>
__device__ inline void load_unit(const T* source, int count, int width, float (&values)[kUnit]) {
  if (count == kUnit && width >= 16) {
    constexpr int kPerLoad = 16 / int(sizeof(T));
#pragma unroll
    for (int p = 0; p < kUnit / kPerLoad; ++p) {
      const Vector16<T> loaded = reinterpret_cast<const Vector16<T>*>(source)[p];
#pragma unroll
      for (int i = 0; i < kPerLoad; ++i) values[p * kPerLoad + i] = to_float(loaded.value[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < int(kUnit); ++i) values[i] = i < count ? to_float(source[i]) : 0.0f;
}

__device__ inline uint32_t largest_bits(const float (&values)[kUnit]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < int(kUnit); ++i) largest = max(largest, float_bits(values[i]) & 0x7FFFFFFFu);
  return largest;
}

// Maximum over groups of `lanes` neighbouring threads; every thread of the warp must call it.
__device__ inline uint32_t group_max(uint32_t value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  return value;
}

// Maximum over a CTA of `Warps` warps; `shared` has one word per warp.
template <int Warps>
__device__ inline uint32_t cta_max(uint32_t value, uint32_t (&shared)[Warps]) {
  value = group_max(value, 32);
  __syncthreads();  // the previous use of `shared` is over
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  uint32_t result = 0;
#pragma unroll
  for (int w = 0; w < Warps; ++w) result = max(result, shared[w]);
  return result;
}

// Values of a unit as a (Row)Normalizer makes them; 0 where the scale is 0 or NaN. One branch for all of them: a scale whose
// reciprocal overflows is rare.
template <class Normalize>
__device__ inline void normalize_unit(const Normalize& normalize, float (&values)[kUnit]) {
  const bool coded = normalize.scale > 0.0f;
  if (coded && !normalize.divide) {
#pragma unroll
    for (int i = 0; i < int(kUnit); ++i) values[i] = normalize.product(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < int(kUnit); ++i) values[i] = coded ? normalize(values[i]) : 0.0f;
  }
}

// Two words of 8-bit codes.
template <bool FP8>
__device__ inline uint2 codes_of(const float (&values)[kUnit]) {
  uint32_t word[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < int(kUnit); i += 2)
    word[i / 4] |= (FP8 ? floats_to_fp8(values[i], values[i + 1]) : float_to_int8(values[i]) | float_to_int8(values[i + 1]) << 8)
                   << (8 * (i % 4));
  return make_uint2(word[0], word[1]);
}

}  // namespace halfbyte::cuda
