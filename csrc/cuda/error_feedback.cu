// error_feedback: the arithmetic of csrc/cpu/error_feedback_kernel.h, operation by operation, so the same bits.
//
// A CTA owns 32 rows, 8 neighbouring threads of a warp one row. Per panel of 64 columns: the 8 threads round column after
// column in shared memory, each updating every eighth column to come; then all threads carry the panel's errors into the rest
// of the row, which lives in `targets`: thread (k, g) adds to column k of 8 rows, so a warp reads 32 columns at once.
#include "../error_feedback.h"
#include "elements.h"
#include "kernels.h"
#include "launch.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 32;                 // of a CTA
constexpr int kLanes = kThreads / kRows;  // threads of a row
constexpr int kPanel = int(kFeedbackPanel);
constexpr int kGroupRows = kRows * kPanel / kThreads;  // rows a thread carries errors into

struct FeedbackLaunch {
  FeedbackArgs a;
  RowLayout layout;
  int64_t rows;
  EncodeTable table;
  float values[16];
};

struct Tables {
  Bucket bucket[32];
  float values[16];
};

// What an element decodes to after rounding under one scale; 0 where the scale is not positive and finite.
template <int32_t Format>
struct Rounder {
  static constexpr float kLimit = Format == kInt8 ? kInt8Max : kFP8Max;
  static constexpr bool k4Bit = Format == kNF4 || Format == kFP4;
  const Tables& tables;
  float scale, unit;
  bool valid;
  __device__ Rounder(const Tables& t, float s)
      : tables(t), scale(s), unit(k4Bit ? s : div_rn(s, kLimit)), valid(s > 0.0f && is_finite(s)) {}

  __device__ float operator()(float x) const {
    if (!valid) return 0.0f;
    if constexpr (k4Bit) {
      return mul_rn(tables.values[encode_4bit<Format == kFP4>(tables.bucket, Normalizer(scale)(x))], unit);
    } else {
      const float v = RowNormalizer(scale, kLimit)(x);
      return mul_rn(Format == kInt8 ? float(int8_t(float_to_int8(v))) : fp8_to_float(float_to_fp8(v)), unit);
    }
  }
};

// The row's scale of one block; every thread of the warp must call it. w: the block in global memory, null for no row.
template <int32_t Format>
__device__ inline float search_scale(const FeedbackArgs& a, const Tables& tables, const float* w, const float* importance,
                                     int64_t count, int lane) {
  float absmax = 0.0f;
  for (int64_t k = lane; w && k < count; k += kLanes) {
    const float magnitude = bits_float(float_bits(w[k]) & 0x7FFFFFFFu);
    absmax = magnitude > absmax ? magnitude : absmax;
  }
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, absmax, offset);
    absmax = other > absmax ? other : absmax;
  }
  float least = bits_float(0x7F800000u);
  int best = 0x7FFFFFFF;
  for (int64_t c = lane; w && c < a.num_candidates; c += kLanes) {
    const Rounder<Format> round(tables, mul_rn(absmax, a.candidates[c]));
    float error = 0.0f;
    for (int64_t k = 0; k < count; ++k) {
      const float x = w[k], off = sub_rn(x, round(x));
      error = fma_rn(mul_rn(off, off), importance[k], error);
    }
    if (error < least) {
      least = error;
      best = int(c);
    }
  }
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {  // of equals the first candidate
    const float other = __shfl_xor_sync(0xFFFFFFFFu, least, offset);
    const int index = __shfl_xor_sync(0xFFFFFFFFu, best, offset);
    if (other < least || (other == least && index < best)) {
      least = other;
      best = index;
    }
  }
  return best == 0x7FFFFFFF ? absmax : mul_rn(absmax, a.candidates[best]);
}

// Carries the errors of columns [begin, begin + width) into columns from end on.
__device__ inline void carry(const FeedbackArgs& a, int64_t K, int64_t first, int64_t rows, int64_t begin, int width,
                             const float (&errors)[kRows][kPanel + 1]) {
  const int column = int(threadIdx.x) % kPanel, group = int(threadIdx.x) / kPanel * kGroupRows;
  for (int64_t k = begin + width + column; k < K; k += kPanel) {
    float sum[kGroupRows];
#pragma unroll
    for (int i = 0; i < kGroupRows; ++i) sum[i] = group + i < rows ? a.targets[(first + group + i) * K + k] : 0.0f;
    for (int j = 0; j < width; ++j) {
      const float u = a.factor[(begin + j) * K + k];
#pragma unroll
      for (int i = 0; i < kGroupRows; ++i) sum[i] = fma_rn(errors[group + i][j], u, sum[i]);
    }
#pragma unroll
    for (int i = 0; i < kGroupRows; ++i) {
      if (group + i < rows) a.targets[(first + group + i) * K + k] = sum[i];
    }
  }
}

template <int32_t Format>
__global__ void __launch_bounds__(kThreads) error_feedback_kernel(const FeedbackLaunch launch) {
  __shared__ Tables tables;
  __shared__ float w[kRows][kPanel + 1], errors[kRows][kPanel + 1];  // + 1: the rows of a warp lie in different banks
  const FeedbackArgs& a = launch.a;
  const RowLayout& l = launch.layout;
  const int64_t K = l.in_features;
  if (threadIdx.x < 32) tables.bucket[threadIdx.x] = launch.table.bucket[threadIdx.x];
  if (threadIdx.x < 16) tables.values[threadIdx.x] = launch.values[threadIdx.x];
  const int lane = int(threadIdx.x) % kLanes, r = int(threadIdx.x) / kLanes;
  for (int64_t first = int64_t(blockIdx.x) * kRows; first < launch.rows; first += int64_t(gridDim.x) * kRows) {
    const int64_t rows = launch.rows - first < kRows ? launch.rows - first : kRows;
    const bool present = r < rows;
    float* row = a.targets + (first + r) * K;
    for (int64_t i = threadIdx.x; i < rows * K; i += kThreads) a.targets[first * K + i] = a.weight[first * K + i];
    __syncthreads();
    for (int64_t b = 0; b < l.num_blocks; ++b) {
      const int64_t start = b * l.block_size, left = K - start, count = left < l.block_size ? left : l.block_size;
      const float scale = !a.scales ? search_scale<Format>(a, tables, present ? row + start : nullptr, a.importance + start, count, lane)
                          : present ? a.scales[(first + r) * l.num_blocks + b]
                                    : 0.0f;
      if (present && lane == 0) a.chosen[(first + r) * l.num_blocks + b] = scale;
      if (!a.factor) continue;
      const Rounder<Format> round(tables, scale);
      for (int64_t begin = start; begin < start + count; begin += kPanel) {
        const int width = start + count - begin < kPanel ? int(start + count - begin) : kPanel;
        for (int c = lane; c < width; c += kLanes) w[r][c] = present ? row[begin + c] : 0.0f;
        __syncwarp();
        for (int j = 0; j < width; ++j) {
          const float* factor = a.factor + (begin + j) * K + begin;
          const float x = w[r][j], error = div_rn(sub_rn(round(x), x), factor[j]);
          for (int c = j + 1 + lane; c < width; c += kLanes) w[r][c] = fma_rn(error, factor[c], w[r][c]);
          if (lane == 0) errors[r][j] = error;
          __syncwarp();
        }
        for (int c = lane; present && c < width; c += kLanes) row[begin + c] = w[r][c];
        __syncthreads();
        carry(a, K, first, rows, begin, width, errors);
        __syncthreads();
      }
    }
  }
}

using Kernel = void (*)(FeedbackLaunch);

Kernel kernel_for(int32_t format) {
  switch (format) {
    case kNF4:
    case kNF4DQ: return error_feedback_kernel<kNF4>;
    case kFP4:
    case kFP4DQ: return error_feedback_kernel<kFP4>;
    case kInt8: return error_feedback_kernel<kInt8>;
    default: return error_feedback_kernel<kFP8>;
  }
}

}  // namespace

cudaError_t launch_error_feedback(const FeedbackArgs& args, int64_t rows, const RowLayout& layout, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  FeedbackLaunch launched{};
  launched.a = args;
  launched.layout = layout;
  launched.rows = rows;
  if (is_4bit(layout.format)) {
    launched.table = make_encode_table(layout.format);
    for (int i = 0; i < 16; ++i) launched.values[i] = codebook(layout.format)[i];
  }
  const int64_t tiles = (rows + kRows - 1) / kRows, most = int64_t(multiprocessors()) * 4;
  return launch(kernel_for(layout.format), unsigned(tiles < most ? tiles : most), 1, kThreads, 0, stream, launched);
}

}  // namespace halfbyte::cuda
