// linear for M = 1..16 rows of bf16 or fp16 input: packed weights go straight into tensor core fragments (linear_steps.h).
//
// A byte becomes two 16-bit values by a table of 256 words, replicated per bank (32 KB): no conflict, and 1 instruction a weight
// with the address (LaneTable). 4 steps a warp are loaded ahead: 2 KB a warp, 32 KB a multiprocessor, where 4.3 TB/s at 0.7 us
// need 23. Warps and splits of K are added in a fixed order. All of it takes 2.0 instructions a weight for M <= 8 and 2.3 for
// M <= 16 (benchmarks/sass_counts.py), where reading at 4.3 TB/s leaves 4.
#include "linear_steps.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = int(kSmallWarps) * 32;
constexpr int kAhead = 4;  // steps in flight a warp

// Rows of input are 16-byte aligned, rows of packed 8-byte.
struct SmallArgs : ProductArgs {
  uint32_t tiles;
};

template <class T>
__device__ inline Activations load_activations(const T* input) {
  const uint4* p = reinterpret_cast<const uint4*>(input);
  return {{__ldg(p), __ldg(p + 1)}};
}

// Columns: 1 for M <= 8, 2 for M <= 16.
template <class T, bool DQ, int Columns>
__global__ void __launch_bounds__(kThreads, int(kSmallResident)) linear_small_kernel(const SmallArgs a) {
  __shared__ uint32_t table[kTableWords];
  __shared__ float partial[kSmallWarps][Columns * 8][kSmallRows];
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32), g = lane / 4, t = lane % 4;
  fill_byte_table<T>(a.codebook, table);
  __syncthreads();
  const LaneTable lane_table(table);
  const int begin = a.begin(), end = a.end();
  for (uint32_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    StepSource<DQ, true> from(a.packed, a.layout, uint32_t(a.N), tile * uint32_t(kSmallRows), g, t);
    const T* input[Columns];  // rows past M repeat the last one
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      const int m = g + 8 * c < a.M ? g + 8 * c : a.M - 1;
      input[c] = static_cast<const T*>(a.input) + m * a.layout.in_features + 16 * t;
    }
    const auto advance = [&](int chunks) {
      from.advance(chunks);
#pragma unroll
      for (int c = 0; c < Columns; ++c) input[c] = kept(input[c] + chunks * kSmallChunk);
    };
    float sums[Columns][4] = {};
    Step ring[kAhead];
    // A round of a warp is 4 steps in a row: 128 bytes, a whole line, of each of its 16 rows. Steps past the range are not
    // loaded, and not multiplied either.
    constexpr int kRound = kAhead * int(kSmallWarps);
    int chunk = begin + warp * kAhead;
    advance(chunk);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (chunk + j < end) from.load(ring[j], j, chunk + j, a.block_shift);
    }
    for (; chunk < end; chunk += kRound, advance(kRound)) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (chunk + j >= end) continue;
        Activations x[Columns];
#pragma unroll
        for (int c = 0; c < Columns; ++c) x[c] = load_activations(input[c] + j * int(kSmallChunk));
        const StepWeights w(lane_table, ring[j]);
        const StepScales scales = from.scales_of(ring[j]);
#pragma unroll
        for (int c = 0; c < Columns; ++c) multiply_step<T>(w, scales, x[c], sums[c]);
        if (chunk + j + kRound < end) from.load(ring[j], j + kRound, chunk + j + kRound, a.block_shift);
      }
    }
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) partial[warp][c * 8 + 2 * t + i % 2][g + 8 * (i / 2)] = sums[c][i];
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < Columns * 8 * int(kSmallRows); i += kThreads) {
      const int m = i / int(kSmallRows), r = i % int(kSmallRows);
      const uint32_t n = tile * uint32_t(kSmallRows) + uint32_t(r);
      if (m >= a.M || n >= uint32_t(a.N)) continue;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < int(kSmallWarps); ++w) sum += partial[w][m][r];
      leave_sum<T>(a, m, n, sum);
    }
    __syncthreads();  // `partial` is free again
  }
}

template <class T, bool DQ>
KernelChoice<SmallArgs> choose(int rows) {
  return {rows > 8 ? linear_small_kernel<T, DQ, 2> : linear_small_kernel<T, DQ, 1>, 0};
}

}  // namespace

int64_t linear_small_splits(int64_t N, int64_t K) { return small_plan(N, K, multiprocessors()).splits; }

cudaError_t launch_linear_small(const PackedProduct& p, cudaStream_t stream) {
  const SmallPlan plan = small_plan(p.N, p.layout.in_features, multiprocessors());
  const SmallArgs args{linear_args(p), uint32_t(plan.tiles)};
  const cudaError_t error =
      launch_splits(p, args, plan.grid, kThreads, stream, [&]<class T, bool DQ>() { return choose<T, DQ>(args.M); });
  return error != cudaSuccess ? error : add_splits(p, args, stream);
}

}  // namespace halfbyte::cuda
