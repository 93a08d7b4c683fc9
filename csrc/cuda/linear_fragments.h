// What the kernels of linear and linear_backward_input on packed rows share: the byte table and the sum over splits.
#pragma once

#include "kernels.h"
#include "launch.h"
#include "mma.h"

namespace halfbyte::cuda {

struct Codebook16 {
  float value[16];
};
inline Codebook16 codebook_of(const RowLayout& layout) {
  Codebook16 book{};
  for (int i = 0; i < 16; ++i) book.value[i] = codebook(layout.format)[i];
  return book;
}

template <class T>
__device__ inline uint32_t bits16(float v) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return static_cast<__nv_bfloat16_raw>(from_float<T>(v)).x;
  } else {
    return static_cast<__half_raw>(from_float<T>(v)).x;
  }
}

// table[byte][lane] = the 16-bit values of the byte's two codes, the high nibble in the lower half; one copy per bank, so that no
// look-up conflicts. Called by 256 threads, one entry each; a barrier must follow.
constexpr int kTableWords = 256 * 32;
template <class T>
__device__ inline void fill_byte_table(const Codebook16& book, uint32_t* table) {
  const uint32_t byte = threadIdx.x;
  const uint32_t pair = bits16<T>(book.value[byte >> 4]) | bits16<T>(book.value[byte & 15]) << 16;
#pragma unroll 8
  for (uint32_t j = 0; j < 32; ++j) table[byte * 32 + ((j + byte) & 31u)] = pair;  // each thread in its own bank
}

// Where sums over the whole reduction go: (M, columns) of T, plus an addend.
struct SumTarget {
  const void* addend;     // (columns,) of T (addend_stride 0), (M, addend_stride) of T, or null
  int64_t addend_stride;
  void* output;           // (M, columns) of T
  int64_t columns;
};
inline SumTarget sum_target(const PackedProduct& p, int64_t columns) { return {p.addend, p.addend_stride, p.output, columns}; }

template <class T>
__device__ inline void store_sum(const SumTarget& target, int m, int64_t column, float sum) {
  if (target.addend) sum += to_float(static_cast<const T*>(target.addend)[m * target.addend_stride + column]);
  static_cast<T*>(target.output)[m * target.columns + column] = from_float<T>(sum);
}

// The second pass: partial (splits, M, columns), added in the order of the splits.
template <class T>
__global__ void __launch_bounds__(256) add_splits_kernel(const SumTarget target, const float* partial, int M, int splits) {
  const int64_t count = M * target.columns;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < count; i += gridDim.x * int64_t(256)) {
    float sum = 0.0f;
    for (int s = 0; s < splits; ++s) sum += partial[s * count + i];
    store_sum<T>(target, int(i / target.columns), i % target.columns, sum);
  }
}

template <class T>
cudaError_t add_splits(const SumTarget& target, const float* partial, int64_t M, int64_t splits, cudaStream_t stream) {
  const int64_t needed = (M * target.columns + 255) / 256;
  return launch(add_splits_kernel<T>, unsigned(needed < 4096 ? needed : 4096), 1, 256, 0, stream, target, partial, int(M), int(splits));
}

}  // namespace halfbyte::cuda
