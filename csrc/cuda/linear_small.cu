// linear for M = 1..16 rows of bf16 or fp16 input: packed weights go straight into tensor core fragments.
//
// D^T = W X^T with mma.m16n8k16: one byte of a packed row is one A register (k, k+1), so nothing is repacked. The order of k
// inside a step of 64 elements is free as long as W and X agree: lane 4 g + t takes bytes 8 t .. 8 t + 7 of rows g and g + 8
// (one 8-byte load a row, 32 contiguous bytes a quad) and elements 16 t .. 16 t + 15 of input row g (two 16-byte loads).
//
//   step of 64 elements, row g:  | t=0: 16 elements | t=1: 16 | t=2: 16 | t=3: 16 |   4 mma, one scale
//
// A byte becomes two 16-bit values by a table of 256 words, replicated per bank (32 KB): no conflict, and 1 instruction a weight
// with the address (LaneTable). Codebook values are rounded to 16 bits, scales multiply the fp32 sums: an error of 2^-8 (bf16) or
// 2^-11 (fp16) relative per weight, as when a dense weight is rounded. 4 steps a warp are loaded ahead: 2 KB a warp, 32 KB a
// multiprocessor, where 4.3 TB/s at 0.7 us need 23. Warps and splits of K are added in a fixed order. All of it takes 2.0
// instructions a weight for M <= 8 and 2.3 for M <= 16 (benchmarks/sass_counts.py), where reading at 4.3 TB/s leaves 4.
#include "linear_fragments.h"
#include "linear_route.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = int(kSmallWarps) * 32;
constexpr int kAhead = 4;  // steps in flight a warp

struct SmallArgs {
  const void* input;      // (M, K) of T, 16-byte aligned rows
  const uint8_t* packed;  // (N, row_bytes), 8-byte aligned
  SumTarget target;       // one split
  float* partial;         // (splits, M, N): several
  RowLayout layout;
  int M;
  uint32_t N, tiles;
  int chunks, chunks_per_split;
  int block_shift;        // log2 of chunks a block
  Codebook16 codebook;
};

// What one lane reads: rows g and g + 8 of a tile and rows g (and g + 8) of input, at the lane's place in a step.
template <class T, int Columns>
struct LaneSource {
  const uint8_t* codes[2];
  const uint8_t* scales[2];   // float, or the uint8 codes of -dq
  float step[2], low[2];      // -dq
  const T* input[Columns];

  __device__ void advance(int chunks) {
#pragma unroll
    for (int i = 0; i < 2; ++i) codes[i] += chunks * int64_t(kSmallChunk / 2);
#pragma unroll
    for (int c = 0; c < Columns; ++c) input[c] = kept(input[c] + chunks * kSmallChunk);
  }
};

struct Step {
  uint2 codes[2];
  float scale[2];
};

// Step `ahead` of where `from` points, the range's chunk number `chunk`.
template <class T, bool DQ, int Columns>
__device__ inline void load_step(Step& s, const LaneSource<T, Columns>& from, int ahead, int chunk, int block_shift) {
  const uint32_t block = uint32_t(chunk) >> block_shift;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    s.codes[i] = load_once(from.codes[i] + ahead * int(kSmallChunk / 2));
    s.scale[i] = DQ ? fma_rn(float(__ldg(from.scales[i] + block)), from.step[i], from.low[i])
                    : __ldg(reinterpret_cast<const float*>(from.scales[i]) + block);
  }
}

// 16 elements of one input row.
struct Activations {
  uint4 half[2];
};
template <class T>
__device__ inline Activations load_activations(const T* input) {
  const uint4* p = reinterpret_cast<const uint4*>(input);
  return {{__ldg(p), __ldg(p + 1)}};
}

// sums += scale * (W X^T) over one step, for 8 columns of X per entry of `x`.
template <class T, int Columns>
__device__ inline void multiply_step(const LaneTable& table, const Step& s, const Activations (&x)[Columns],
                                     float (&sums)[Columns][4]) {
  float d[Columns][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // bytes 2 i and 2 i + 1 of the lane's 8
    const uint32_t upper = i < 2 ? s.codes[0].x : s.codes[0].y, lower = i < 2 ? s.codes[1].x : s.codes[1].y;
    const int byte = i % 2 * 2;
    const uint32_t w[4] = {table.decode(upper, byte), table.decode(lower, byte),
                           table.decode(upper, byte + 1), table.decode(lower, byte + 1)};
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      const uint4& v = x[c].half[i / 2];
      const uint32_t b[2] = {i % 2 ? v.z : v.x, i % 2 ? v.w : v.y};
      mma_m16n8k16<T>(d[c], w, b);
    }
  }
#pragma unroll
  for (int c = 0; c < Columns; ++c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[c][i] = fma_rn(d[c][i], s.scale[i / 2], sums[c][i]);
  }
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
  const int begin = int(blockIdx.y) * a.chunks_per_split;
  const int end = begin + a.chunks_per_split < a.chunks ? begin + a.chunks_per_split : a.chunks;
  for (uint32_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    LaneSource<T, Columns> from;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Rows past N repeat the last one, like input rows past M; their sums are not stored.
      const uint32_t n = tile * uint32_t(kSmallRows) + uint32_t(g + 8 * i);
      const uint8_t* row = a.packed + int64_t(n < a.N ? n : a.N - 1) * a.layout.row_bytes;
      from.codes[i] = row + 8 * t;
      from.scales[i] = kept(row + (DQ ? a.layout.code_bytes : a.layout.scales_offset));
      if constexpr (DQ) {
        from.step[i] = *reinterpret_cast<const float*>(row + a.layout.scales_offset);
        from.low[i] = *reinterpret_cast<const float*>(row + a.layout.scales_offset + 4);
      }
    }
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      const int m = g + 8 * c < a.M ? g + 8 * c : a.M - 1;
      from.input[c] = static_cast<const T*>(a.input) + m * a.layout.in_features + 16 * t;
    }
    float sums[Columns][4] = {};
    Step ring[kAhead];
    // A round of a warp is 4 steps in a row: 128 bytes, a whole line, of each of its 16 rows. Steps past the range are not
    // loaded, and not multiplied either.
    constexpr int kRound = kAhead * int(kSmallWarps);
    int chunk = begin + warp * kAhead;
    from.advance(chunk);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (chunk + j < end) load_step<T, DQ, Columns>(ring[j], from, j, chunk + j, a.block_shift);
    }
    for (; chunk < end; chunk += kRound, from.advance(kRound)) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (chunk + j >= end) continue;
        Activations x[Columns];
#pragma unroll
        for (int c = 0; c < Columns; ++c) x[c] = load_activations(from.input[c] + j * int(kSmallChunk));
        multiply_step<T, Columns>(lane_table, ring[j], x, sums);
        if (chunk + j + kRound < end) load_step<T, DQ, Columns>(ring[j], from, j + kRound, chunk + j + kRound, a.block_shift);
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
      if (m >= a.M || n >= a.N) continue;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < int(kSmallWarps); ++w) sum += partial[w][m][r];
      if (gridDim.y == 1) {
        store_sum<T>(a.target, m, n, sum);
      } else {
        a.partial[(int64_t(blockIdx.y) * a.M + m) * a.N + n] = sum;
      }
    }
    __syncthreads();  // `partial` is free again
  }
}

using Kernel = void (*)(SmallArgs);

template <class T>
Kernel kernel_for(bool dq, bool wide) {
  if (wide) return dq ? linear_small_kernel<T, true, 2> : linear_small_kernel<T, false, 2>;
  return dq ? linear_small_kernel<T, true, 1> : linear_small_kernel<T, false, 1>;
}

template <class T>
cudaError_t launch_as(const SmallArgs& args, const SmallPlan& plan, cudaStream_t stream) {
  const Kernel kernel = kernel_for<T>(is_double_quantized(args.layout.format), args.M > 8);
  const cudaError_t error = launch(kernel, unsigned(plan.grid), unsigned(plan.splits), kThreads, 0, stream, args);
  if (error != cudaSuccess || plan.splits == 1) return error;
  return add_splits<T>(args.target, args.partial, args.M, plan.splits, stream);
}

}  // namespace

int64_t linear_small_splits(const RowLayout& layout, int64_t N) {
  return small_plan(N, layout.in_features, multiprocessors()).splits;
}

cudaError_t launch_linear_small(const void* input, int64_t M, const uint8_t* packed, int64_t N, const RowLayout& layout,
                                DType dtype, const void* addend, int64_t addend_stride, void* output, float* partial,
                                int64_t splits, cudaStream_t stream) {
  SmallPlan plan = small_plan(N, layout.in_features, multiprocessors());
  plan.splits = splits;
  SmallArgs args{};
  args.input = input;
  args.packed = packed;
  args.target = {addend, addend_stride, output, N};
  args.partial = partial;
  args.layout = layout;
  args.M = int(M);
  args.N = uint32_t(N);
  args.tiles = uint32_t(plan.tiles);
  args.chunks = int(layout.in_features / kSmallChunk);
  args.chunks_per_split = int((args.chunks + plan.splits - 1) / plan.splits);
  while (kSmallChunk << args.block_shift < layout.block_size) ++args.block_shift;
  args.codebook = codebook_of(layout);
  return dtype == DType::kBFloat16 ? launch_as<BFloat16>(args, plan, stream) : launch_as<Float16>(args, plan, stream);
}

}  // namespace halfbyte::cuda
