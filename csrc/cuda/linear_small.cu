// linear for M = 1..16 rows of bf16 or fp16 input: packed weights go straight into tensor core fragments.
//
// D^T = W X^T with mma.m16n8k16: one byte of a packed row is one A register (k, k+1), so nothing is repacked. The order of k
// inside a step of 64 elements is free as long as W and X agree: lane 4 g + t takes bytes 8 t .. 8 t + 7 of rows g and g + 8
// (one 8-byte load a row, 32 contiguous bytes a quad) and elements 16 t .. 16 t + 15 of input row g (two 16-byte loads).
//
//   step of 64 elements, row g:  | t=0: 16 elements | t=1: 16 | t=2: 16 | t=3: 16 |   4 mma, one scale
//
// A byte becomes two 16-bit values by a table of 256 words, replicated per bank (32 KB): no conflict, 1.5 instructions a
// weight with the address. Codebook values are rounded to 16 bits, scales multiply the fp32 sums: an error of 2^-9 (bf16) or
// 2^-11 (fp16) relative per weight, as when a dense weight is rounded. 4 steps a warp are loaded ahead: 2 KB a warp, 32 KB a
// multiprocessor, where 4.3 TB/s at 0.7 us need 23. Warps and splits of K are added in a fixed order.
#include "kernels.h"
#include "launch.h"
#include "linear_route.h"
#include "mma.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = int(kSmallWarps) * 32;
constexpr int kAhead = 4;  // steps in flight a warp

struct SmallArgs {
  const void* input;      // (M, K) of T, 16-byte aligned rows
  const uint8_t* packed;  // (N, row_bytes), 8-byte aligned
  const void* addend;     // (N,) of T, or (M, addend_stride) of T, or null; only with one split
  int64_t addend_stride;  // 0 for (N,)
  void* output;           // (M, N) of T: one split
  float* partial;         // (splits, M, N): several
  RowLayout layout;
  int M;
  uint32_t N, tiles;
  int chunks, chunks_per_split;
  int block_shift;        // log2 of chunks a block
  float codebook[16];
};

template <class T>
__device__ inline uint32_t bits16(float v) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return static_cast<__nv_bfloat16_raw>(from_float<T>(v)).x;
  } else {
    return static_cast<__half_raw>(from_float<T>(v)).x;
  }
}

// Rows g and g + 8 of a tile, as one lane sees them.
struct LaneRows {
  const uint8_t* row[2];
  float step[2], low[2];  // -dq
};

struct Step {
  uint2 codes[2];
  float scale[2];
};

template <bool DQ>
__device__ inline Step load_step(const SmallArgs& a, const LaneRows& rows, int chunk, int end, int t) {
  Step s{{make_uint2(0, 0), make_uint2(0, 0)}, {0.0f, 0.0f}};
  if (chunk >= end) return s;  // its input is taken as 0
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint8_t* row = rows.row[i];
    s.codes[i] = load_once(row + chunk * int64_t(kSmallChunk / 2) + 8 * t);
    const int64_t block = chunk >> a.block_shift;
    s.scale[i] = DQ ? fma_rn(float(row[a.layout.code_bytes + block]), rows.step[i], rows.low[i])
                    : *reinterpret_cast<const float*>(row + a.layout.scales_offset + 4 * block);
  }
  return s;
}

// 16 elements of one input row; 0 for rows and steps that do not exist.
struct Activations {
  uint4 half[2];
};
template <class T>
__device__ inline Activations load_activations(const SmallArgs& a, int m, int chunk, int end, int t) {
  if (m >= a.M || chunk >= end) return {{make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)}};
  const uint4* p = reinterpret_cast<const uint4*>(static_cast<const T*>(a.input) + m * a.layout.in_features +
                                                  chunk * kSmallChunk + 16 * t);
  return {{__ldg(p), __ldg(p + 1)}};
}

// table[byte][lane]
__device__ inline uint32_t decode(const uint32_t* lane_table, uint32_t word, int byte) {
  return lane_table[((word >> (8 * byte)) & 0xFFu) * 32];
}

// sums += scale * (W X^T) over one step, for 8 columns of X per entry of `x`.
template <class T, int Columns>
__device__ inline void multiply_step(const uint32_t* lane_table, const Step& s, const Activations (&x)[Columns],
                                     float (&sums)[Columns][4]) {
  float d[Columns][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // bytes 2 i and 2 i + 1 of the lane's 8
    const uint32_t upper = i < 2 ? s.codes[0].x : s.codes[0].y, lower = i < 2 ? s.codes[1].x : s.codes[1].y;
    const int byte = i % 2 * 2;
    const uint32_t w[4] = {decode(lane_table, upper, byte), decode(lane_table, lower, byte),
                           decode(lane_table, upper, byte + 1), decode(lane_table, lower, byte + 1)};
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

template <class T>
__device__ inline void store_output(const SmallArgs& a, int m, uint32_t n, float sum) {
  if (a.addend) sum += to_float(static_cast<const T*>(a.addend)[m * a.addend_stride + n]);
  static_cast<T*>(a.output)[m * int64_t(a.N) + n] = from_float<T>(sum);
}

// Columns: 1 for M <= 8, 2 for M <= 16.
template <class T, bool DQ, int Columns>
__global__ void __launch_bounds__(kThreads, int(kSmallResident)) linear_small_kernel(const SmallArgs a) {
  __shared__ uint32_t table[256 * 32];
  __shared__ float partial[kSmallWarps][Columns * 8][kSmallRows];
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32), g = lane / 4, t = lane % 4;
  {
    const uint32_t byte = threadIdx.x;  // 256 threads, one entry each; element 2i is the high nibble and the lower half
    const uint32_t pair = bits16<T>(a.codebook[byte >> 4]) | bits16<T>(a.codebook[byte & 15]) << 16;
#pragma unroll 8
    for (uint32_t j = 0; j < 32; ++j) table[byte * 32 + ((j + byte) & 31u)] = pair;  // each thread in its own bank
  }
  __syncthreads();
  const uint32_t* lane_table = table + lane;
  const int begin = int(blockIdx.y) * a.chunks_per_split;
  const int end = begin + a.chunks_per_split < a.chunks ? begin + a.chunks_per_split : a.chunks;
  for (uint32_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    LaneRows rows{};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Rows past N repeat the last one; their sums are not stored.
      const uint32_t n = tile * uint32_t(kSmallRows) + uint32_t(g + 8 * i);
      rows.row[i] = a.packed + int64_t(n < a.N ? n : a.N - 1) * a.layout.row_bytes;
      if constexpr (DQ) {
        rows.step[i] = *reinterpret_cast<const float*>(rows.row[i] + a.layout.scales_offset);
        rows.low[i] = *reinterpret_cast<const float*>(rows.row[i] + a.layout.scales_offset + 4);
      }
    }
    float sums[Columns][4] = {};
    Step ring[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) ring[j] = load_step<DQ>(a, rows, begin + warp + j * int(kSmallWarps), end, t);
    for (int first = begin + warp; first < end; first += kAhead * int(kSmallWarps)) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int chunk = first + j * int(kSmallWarps);
        const Step step = ring[j];
        ring[j] = load_step<DQ>(a, rows, chunk + kAhead * int(kSmallWarps), end, t);
        Activations x[Columns];
#pragma unroll
        for (int c = 0; c < Columns; ++c) x[c] = load_activations<T>(a, g + 8 * c, chunk, end, t);
        multiply_step<T, Columns>(lane_table, step, x, sums);
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
        store_output<T>(a, m, n, sum);
      } else {
        a.partial[(int64_t(blockIdx.y) * a.M + m) * a.N + n] = sum;
      }
    }
    __syncthreads();  // `partial` is free again
  }
}

// The second pass: splits are added in order.
template <class T>
__global__ void __launch_bounds__(256) add_splits_kernel(const SmallArgs a, int splits) {
  const int64_t count = int64_t(a.M) * a.N;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < count; i += gridDim.x * int64_t(256)) {
    float sum = 0.0f;
    for (int s = 0; s < splits; ++s) sum += a.partial[s * count + i];
    store_output<T>(a, int(i / a.N), uint32_t(i % a.N), sum);
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
  const int64_t needed = (int64_t(args.M) * args.N + 255) / 256;
  return launch(add_splits_kernel<T>, unsigned(needed < 4096 ? needed : 4096), 1, 256, 0, stream, args, int(plan.splits));
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
  args.addend = addend;
  args.addend_stride = addend_stride;
  args.output = output;
  args.partial = partial;
  args.layout = layout;
  args.M = int(M);
  args.N = uint32_t(N);
  args.tiles = uint32_t(plan.tiles);
  args.chunks = int(layout.in_features / kSmallChunk);
  args.chunks_per_split = int((args.chunks + plan.splits - 1) / plan.splits);
  while (kSmallChunk << args.block_shift < layout.block_size) ++args.block_shift;
  for (int i = 0; i < 16; ++i) args.codebook[i] = codebook(layout.format)[i];
  return dtype == DType::kBFloat16 ? launch_as<BFloat16>(args, plan, stream) : launch_as<Float16>(args, plan, stream);
}

}  // namespace halfbyte::cuda
