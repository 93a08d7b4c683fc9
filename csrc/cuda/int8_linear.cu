// int8_linear: integer products of int8 rows by dp4a, and the epilogue that turns int32 sums into outputs.
//
// Both operands are packed int8 rows (codes, zeros to 4, one absmax): the activations were quantized by launch_quantize.
// y = round(float(sum) * ((token absmax / 127) * (row absmax / 127)) + bias), every operation rounded: the CPU's bits.
// Legend: M tokens, N rows of packed, K in_features.
#include "elements.h"
#include "int8_linear_route.h"
#include "kernels.h"
#include "launch.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = 8;  // of one pass over a row's codes; 8 sums and 16 bytes of codes a lane

struct Int8Args {
  const uint8_t* tokens;  // (M, row_bytes)
  const uint8_t* packed;  // (N, row_bytes), 16-byte aligned
  const int32_t* sums;    // (M, N), or null where the kernel makes them itself
  const void* bias;       // (N,) of T or null
  void* output;           // (M, N) of T
  int64_t M, N;
  RowLayout layout;
};

__device__ inline float factor_of(const uint8_t* row, const RowLayout& l) {
  return div_rn(*reinterpret_cast<const float*>(row + l.scales_offset), kInt8Max);
}

template <class T>
__device__ inline void store_result(const Int8Args& a, int64_t m, int64_t n, int32_t sum, float token_factor, float row_factor) {
  float value = mul_rn(float(sum), mul_rn(token_factor, row_factor));
  if (a.bias) value = add_rn(value, to_float(static_cast<const T*>(a.bias)[n]));
  static_cast<T*>(a.output)[m * a.N + n] = from_float<T>(value);
}

// 16 bytes of a row as 4 words of 4 codes; words past the codes (zeros, then the scale) count as zero.
__device__ inline void load_codes(const uint8_t* row, int64_t chunk, int64_t words, uint32_t (&out)[4]) {
  const uint4 v = *reinterpret_cast<const uint4*>(row + 16 * chunk);
  out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (4 * chunk + i >= words) out[i] = 0;
  }
}

// One warp per row of packed and kTokens tokens; lanes take 16 bytes of K in turn.
template <class T>
__global__ void __launch_bounds__(kThreads) int8_linear_kernel(const Int8Args a) {
  const int lane = int(threadIdx.x % 32);
  const int64_t words = (a.layout.in_features + 3) / 4, chunks = (words + 3) / 4;
  const int64_t first = blockIdx.x * int64_t(kWarps) + threadIdx.x / 32;
  for (int64_t m0 = int64_t(blockIdx.y) * kTokens; m0 < a.M; m0 += int64_t(gridDim.y) * kTokens) {
    const int tokens = a.M - m0 < kTokens ? int(a.M - m0) : kTokens;
    for (int64_t n = first; n < a.N; n += int64_t(gridDim.x) * kWarps) {
      const uint8_t* row = a.packed + n * a.layout.row_bytes;
      int32_t sum[kTokens] = {};
      for (int64_t c = lane; c < chunks; c += 32) {
        uint32_t w[4];
        load_codes(row, c, words, w);
#pragma unroll
        for (int m = 0; m < kTokens; ++m) {
          uint32_t x[4];  // tokens past the end repeat the last one; their sums are not stored
          load_codes(a.tokens + (m0 + (m < tokens ? m : tokens - 1)) * a.layout.row_bytes, c, words, x);
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[m] = dot4(w[i], x[i], sum[m]);
        }
      }
#pragma unroll
      for (int m = 0; m < kTokens; ++m) {
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) sum[m] += __shfl_xor_sync(0xFFFFFFFFu, sum[m], mask);
      }
#pragma unroll
      for (int m = 0; m < kTokens; ++m) {
        if (lane == m && m < tokens)
          store_result<T>(a, m0 + m, n, sum[m], factor_of(a.tokens + (m0 + m) * a.layout.row_bytes, a.layout),
                          factor_of(row, a.layout));
      }
    }
  }
}

// The epilogue of aten::_int_mm: a CTA takes 256 columns of several rows.
template <class T>
__global__ void __launch_bounds__(kThreads) int8_scale_kernel(const Int8Args a) {
  for (int64_t n = blockIdx.x * int64_t(kThreads) + threadIdx.x; n < a.N; n += gridDim.x * int64_t(kThreads)) {
    const float row_factor = factor_of(a.packed + n * a.layout.row_bytes, a.layout);
    for (int64_t m = blockIdx.y; m < a.M; m += gridDim.y)
      store_result<T>(a, m, n, a.sums[m * a.N + n], factor_of(a.tokens + m * a.layout.row_bytes, a.layout), row_factor);
  }
}

template <class T>
cudaError_t launch_as(const Int8Args& a, cudaStream_t stream) {
  const auto smaller = [](int64_t x, int64_t y) { return unsigned(x < y ? x : y); };
  if (a.sums) {  // a wave of CTAs: each asks for the factors of its columns once, for many tokens
    const int64_t columns = (a.N + kThreads - 1) / kThreads, wave = int64_t(multiprocessors()) * (2048 / kThreads);
    return launch(int8_scale_kernel<T>, smaller(columns, 65535), smaller(a.M, (wave + columns - 1) / columns), kThreads, 0, stream, a);
  }
  return launch(int8_linear_kernel<T>, smaller((a.N + kWarps - 1) / kWarps, int64_t(multiprocessors()) * 32),
                smaller((a.M + kTokens - 1) / kTokens, 65535), kThreads, 0, stream, a);
}

}  // namespace

cudaError_t launch_int8_linear(const uint8_t* tokens, int64_t M, const uint8_t* packed, int64_t N, const RowLayout& layout,
                               const int32_t* sums, DType dtype, const void* bias, void* output, cudaStream_t stream) {
  if (M <= 0 || N <= 0) return cudaSuccess;
  const Int8Args args{tokens, packed, sums, bias, output, M, N, layout};
  switch (dtype) {
    case DType::kFloat32: return launch_as<float>(args, stream);
    case DType::kBFloat16: return launch_as<BFloat16>(args, stream);
    default: return launch_as<Float16>(args, stream);
  }
}

}  // namespace halfbyte::cuda
