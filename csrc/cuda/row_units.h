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

}  // namespace halfbyte::cuda
