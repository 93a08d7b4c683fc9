// What the kernels of linear and linear_backward_input on packed rows share: arguments, the byte table, the sum over splits.
#pragma once

#include "geometry.h"
#include "kernels.h"
#include "launch.h"
#include "linear_route.h"
#include "mma.h"

namespace halfbyte::cuda {

struct Codebook16 {
  float value[16];
};

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

// What every kernel takes. A split sums steps begin() .. end() - 1 of the reduction.
struct ProductArgs {
  const void* input;      // (M, reduction) of T, contiguous
  const uint8_t* packed;  // (N, row_bytes), contiguous
  SumTarget target;       // one split
  float* partial;         // (splits, M, columns): several
  RowLayout layout;
  int M, N;
  int steps, steps_per_split;
  int block_shift;        // log2 of a block of scales, in the columns of packed that the kernel counts as one
  Codebook16 codebook;

  __device__ int begin() const { return int(blockIdx.y) * steps_per_split; }
  __device__ int end() const {
    const int limit = int(blockIdx.y + 1) * steps_per_split;
    return limit < steps ? limit : steps;
  }
};
inline ProductArgs product_args(const PackedProduct& p, int64_t columns, int64_t reduction, int64_t step, int64_t counted) {
  const int64_t steps = (reduction + step - 1) / step, per_split = (steps + p.splits - 1) / p.splits;
  const int shift = log2_of((p.layout.block_size + counted - 1) / counted);
  ProductArgs args{p.input, p.packed, {p.addend, p.addend_stride, p.output, columns}, p.partial, p.layout, int(p.M), int(p.N),
                   int(steps), int(per_split), shift, {}};
  for (int i = 0; i < 16; ++i) args.codebook.value[i] = codebook(p.layout.format)[i];
  return args;
}
inline ProductArgs linear_args(const PackedProduct& p) {
  return product_args(p, p.N, p.layout.in_features, kSmallChunk, kSmallChunk);
}

template <class T>
__device__ inline void store_sum(const SumTarget& target, int m, int64_t column, float sum) {
  if (target.addend) sum += to_float(static_cast<const T*>(target.addend)[m * target.addend_stride + column]);
  static_cast<T*>(target.output)[m * target.columns + column] = from_float<T>(sum);
}
// A split's sum: the whole one, or its part.
template <class T>
__device__ inline void leave_sum(const ProductArgs& a, int m, int64_t column, float sum) {
  if (gridDim.y == 1) {
    store_sum<T>(a.target, m, column, sum);
  } else {
    a.partial[(int64_t(blockIdx.y) * a.M + m) * a.target.columns + column] = sum;
  }
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
inline cudaError_t add_splits(const PackedProduct& p, const ProductArgs& a, cudaStream_t stream) {
  if (p.splits == 1) return cudaSuccess;
  const int64_t needed = (p.M * a.target.columns + 255) / 256;
  const auto kernel = p.dtype == DType::kBFloat16 ? add_splits_kernel<BFloat16> : add_splits_kernel<Float16>;
  return launch(kernel, unsigned(needed < 4096 ? needed : 4096), 1, 256, 0, stream, a.target, a.partial, a.M, int(p.splits));
}

// Launches what choose.operator()<T, DQ>() gives for a product, for every split.
template <class Args>
struct KernelChoice {
  void (*kernel)(Args);
  int shared_bytes;  // dynamic
};
template <class Args, class Choose>
cudaError_t launch_splits(const PackedProduct& p, const Args& args, int64_t tiles, int threads, cudaStream_t stream,
                          const Choose& choose) {
  const auto of = [&]<class T>() {
    return is_double_quantized(p.layout.format) ? choose.template operator()<T, true>() : choose.template operator()<T, false>();
  };
  const KernelChoice<Args> chosen =
      p.dtype == DType::kBFloat16 ? of.template operator()<BFloat16>() : of.template operator()<Float16>();
  return launch(chosen.kernel, unsigned(tiles), unsigned(p.splits), unsigned(threads), size_t(chosen.shared_bytes), stream, args);
}

}  // namespace halfbyte::cuda
