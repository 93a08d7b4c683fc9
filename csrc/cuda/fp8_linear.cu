// What aten::_scaled_mm needs of fp8_linear's operands, by one launch: the tokens' e4m3 codes and scales, and the scales of the
// weight's rows gathered from where they lie at the rows' ends. Its codes are multiplied in place.
//
// A CTA per token: each thread keeps up to 32 elements in registers between the absmax and the codes, so that rows of up to
// 8192 elements are read once; the rest of a longer row is read again, from L2. CTAs past the tokens gather 256 scales each.
// Legend: M tokens, N rows of packed, K in_features (a multiple of 16 here: units are whole).
#include "fp8_linear_route.h"
#include "kernels.h"
#include "row_units.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kKept = 4;  // units a thread keeps

struct FP8Args {
  const void* input;      // (M, K) of T
  const uint8_t* packed;  // (N, row_bytes), 16-byte aligned
  uint8_t* codes;         // (M, K)
  float* token_scales;    // (M,)
  float* row_scales;      // (N,)
  int64_t M, N;
  RowLayout layout;
  int load_width;         // bytes an input load may take
};

__device__ inline void store_codes(const RowNormalizer& normalize, float (&values)[kUnit], uint8_t* target) {
  normalize_unit(normalize, values);
  *reinterpret_cast<uint2*>(target) = codes_of<true>(values);
}

template <class T>
__device__ inline void quantize_token(const FP8Args& a, int64_t m, uint32_t (&shared)[kWarps]) {
  const int64_t K = a.layout.in_features, units = K / kUnit;
  const T* input = static_cast<const T*>(a.input) + m * K;
  uint8_t* codes = a.codes + m * K;
  float kept[kKept][kUnit];
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int64_t u = threadIdx.x + j * kThreads;
    load_unit(input + u * kUnit, u < units ? int(kUnit) : 0, a.load_width, kept[j]);
    largest = max(largest, largest_bits(kept[j]));
  }
  float values[kUnit];
  for (int64_t u = threadIdx.x + kKept * kThreads; u < units; u += kThreads) {
    load_unit(input + u * kUnit, int(kUnit), a.load_width, values);
    largest = max(largest, largest_bits(values));
  }
  const float absmax = block_scale(cta_max(largest, shared), nullptr);
  const RowNormalizer normalize(absmax, kFP8Max);
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int64_t u = threadIdx.x + j * kThreads;
    if (u < units) store_codes(normalize, kept[j], codes + u * kUnit);
  }
  for (int64_t u = threadIdx.x + kKept * kThreads; u < units; u += kThreads) {
    load_unit(input + u * kUnit, int(kUnit), a.load_width, values);
    store_codes(normalize, values, codes + u * kUnit);
  }
  if (threadIdx.x == 0) a.token_scales[m] = div_rn(absmax, kFP8Max);
}

template <class T>
__global__ void __launch_bounds__(kThreads) fp8_operands_kernel(const FP8Args a) {
  __shared__ uint32_t shared[kWarps];
  const int64_t jobs = a.M + (a.N + kThreads - 1) / kThreads;
  for (int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    if (job < a.M) {
      quantize_token<T>(a, job, shared);
      continue;
    }
    const int64_t n = (job - a.M) * kThreads + threadIdx.x;
    if (n >= a.N) continue;
    a.row_scales[n] = div_rn(*reinterpret_cast<const float*>(a.packed + n * a.layout.row_bytes + a.layout.scales_offset), kFP8Max);
  }
}

}  // namespace

int fp8_capability() { return compute_capability(); }

cudaError_t launch_fp8_operands(const void* input, DType dtype, int64_t M, const uint8_t* packed, int64_t N, const RowLayout& layout,
                                uint8_t* codes, float* token_scales, float* row_scales, cudaStream_t stream) {
  FP8Args args{input, packed, codes, token_scales, row_scales, M, N, layout, 0};
  args.load_width = access_width(input, layout.in_features * (dtype == DType::kFloat32 ? 4 : 2));
  const int64_t jobs = M + (N + kThreads - 1) / kThreads;
  if (jobs <= 0) return cudaSuccess;
  const unsigned grid = unsigned(jobs < (int64_t(1) << 30) ? jobs : (int64_t(1) << 30));
  switch (dtype) {
    case DType::kFloat32: return launch(fp8_operands_kernel<float>, grid, 1, kThreads, 0, stream, args);
    case DType::kBFloat16: return launch(fp8_operands_kernel<BFloat16>, grid, 1, kThreads, 0, stream, args);
    default: return launch(fp8_operands_kernel<Float16>, grid, 1, kThreads, 0, stream, args);
  }
}

}  // namespace halfbyte::cuda
