// linear_backward_input for M = 1..16 rows of bf16 or fp16 gradients: packed weights go straight into tensor core fragments.
//
// D^T = W^T G^T with mma.m16n8k16, the sum over the N rows of packed. A fragment register wants two rows' values of one column;
// a byte of packed is two columns of one row. So the nibbles of two rows' words are interleaved first (4 instructions for 16
// weights) and a byte of that is one look-up in linear_fragments.h's table. The order of rows inside a step of 16 is free as long
// as W and G agree: lane 4 g + t takes rows 4 t .. 4 t + 3 (8 bytes of gradient) and columns 16 g .. 16 g + 15 (8 bytes a row).
//
//   a CTA: 256 columns (2 warps side by side, so that 128 bytes of a row are read together) x a range of rows (4 warps in turn)
//
// Each row has its own scale for a block of columns, which the sum over rows cannot leave outside: a pair of values is multiplied
// by its two rows' scales as 16-bit numbers. Codebook, scale and product are rounded: 3 * 2^-8 (bf16) or 3 * 2^-11 (fp16)
// relative per weight at most. The 4 warps and the splits of N are added in a fixed order.
#include "linear_fragments.h"
#include "linear_route.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 2;                     // steps in flight a warp: 2 KB
constexpr int kWarpColumns = 128;             // of one warp: 16 a lane, 8 lanes
constexpr int kSide = int(kBackwardColumns) / kWarpColumns;  // warps side by side
constexpr int kTurns = kThreads / 32 / kSide;                // warps that take steps in turn
static_assert(kSide == 2 && kTurns == 4);

struct BackwardArgs {
  const void* grad;       // (M, N) of T, 8-byte aligned rows
  const uint8_t* packed;  // (N, row_bytes), 8-byte aligned
  SumTarget target;       // (M, K): one split
  float* partial;         // (splits, M, K): several
  int M, N, K;            // N a multiple of 4, K of 16
  int row_bytes, scales_offset, code_bytes;
  int steps, steps_per_split;  // of 16 rows
  int block_shift;        // log2 of the block size
  Codebook16 codebook;
};

// What a lane needs of one step: 16 columns of 4 rows, their scales, and the gradients of these rows.
template <int Columns>
struct Step {
  uint2 codes[4];
  uint32_t scales[2];  // of rows 0, 1 and of rows 2, 3
  uint2 grad[Columns];
};

// Rows past N repeat the last 4 with gradients of 0. Columns past K and gradient rows past M repeat the last ones; their sums are
// not stored. So every lane loads without a question, and nothing is cleared first.
template <class T, bool DQ, int Columns>
__device__ inline void load_step(Step<Columns>& s, const BackwardArgs& a, int step, int column, int g, int t) {
  const int wanted = step * 16 + 4 * t, n = wanted < a.N ? wanted : a.N - 4;
#pragma unroll
  for (int c = 0; c < Columns; ++c) {
    const int m = g + 8 * c < a.M ? g + 8 * c : a.M - 1;
    const uint2 grad = __ldg(reinterpret_cast<const uint2*>(static_cast<const T*>(a.grad) + m * int64_t(a.N) + n));
    s.grad[c] = n == wanted ? grad : make_uint2(0, 0);
  }
  const uint8_t* row = a.packed + n * int64_t(a.row_bytes);
  const int block = column >> a.block_shift;
  float scale[4];
#pragma unroll
  for (int r = 0; r < 4; ++r, row += a.row_bytes) {
    s.codes[r] = load_once(row + column / 2);
    const float* scales = reinterpret_cast<const float*>(row + a.scales_offset);
    scale[r] = DQ ? fma_rn(float(__ldg(row + a.code_bytes + block)), __ldg(scales), __ldg(scales + 1)) : __ldg(scales + block);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) s.scales[r] = bits16<T>(scale[2 * r]) | bits16<T>(scale[2 * r + 1]) << 16;
}

// sums[i] += the product of columns 2 i (rows g of the fragment) and 2 i + 1 (rows g + 8) of the lane's 16.
template <class T, int Columns>
__device__ inline void multiply_step(const LaneTable& table, const Step<Columns>& s, float (&sums)[8][Columns][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t even[2], odd[2];  // per pair of rows: byte i is column 2 i (or 2 i + 1) of both, the first row in the high nibble
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t first = half ? s.codes[2 * r].y : s.codes[2 * r].x, second = half ? s.codes[2 * r + 1].y : s.codes[2 * r + 1].x;
      even[r] = (first & 0xF0F0F0F0u) | ((second >> 4) & 0x0F0F0F0Fu);
      odd[r] = ((first << 4) & 0xF0F0F0F0u) | (second & 0x0F0F0F0Fu);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t w[4] = {multiply_pair<T>(table.decode(even[0], i), s.scales[0]),
                             multiply_pair<T>(table.decode(odd[0], i), s.scales[0]),
                             multiply_pair<T>(table.decode(even[1], i), s.scales[1]),
                             multiply_pair<T>(table.decode(odd[1], i), s.scales[1])};
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
        const uint32_t b[2] = {s.grad[c].x, s.grad[c].y};
        mma_m16n8k16<T>(sums[4 * half + i][c], w, b);
      }
    }
  }
}

// Adds the sums of the turns of each side in the order ((0 + 1) + (2 + 3)); turn 0 has them afterwards. `shared` has room for
// the sums of 4 warps.
template <int Columns>
__device__ inline void add_turns(float (&sums)[8][Columns][4], int side, int turn, float* shared) {
  constexpr int kCount = 8 * Columns * 4;
  const int lane = int(threadIdx.x % 32);
  float* flat = &sums[0][0][0];
#pragma unroll
  for (int distance = 1; distance < kTurns; distance *= 2) {
    float* slot = shared + (side * (kTurns / 2) + turn / (2 * distance)) * (kCount * 32) + lane;
    __syncthreads();
    if (turn % (2 * distance) == distance) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) slot[i * 32] = flat[i];
    }
    __syncthreads();
    if (turn % (2 * distance) == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) flat[i] += slot[i * 32];
    }
  }
}

// Columns: 1 for M <= 8, 2 for M <= 16.
template <class T, bool DQ, int Columns>
__global__ void __launch_bounds__(kThreads, int(kSmallResident)) linear_backward_small_kernel(const BackwardArgs a) {
  __shared__ uint32_t table[kTableWords];
  static_assert(kTableWords >= 4 * 8 * Columns * 4 * 32);  // add_turns takes the table's place
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32), g = lane / 4, t = lane % 4;
  const int side = warp % kSide, turn = warp / kSide;
  fill_byte_table<T>(a.codebook, table);
  __syncthreads();
  const LaneTable lane_table(table);
  const int column = int(blockIdx.x) * int(kBackwardColumns) + side * kWarpColumns + 16 * g;
  const int from = column < a.K ? column : a.K - 16;
  const int begin = int(blockIdx.y) * a.steps_per_split;
  const int end = begin + a.steps_per_split < a.steps ? begin + a.steps_per_split : a.steps;
  float sums[8][Columns][4] = {};
  Step<Columns> ring[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    if (begin + turn + j * kTurns < end) load_step<T, DQ, Columns>(ring[j], a, begin + turn + j * kTurns, from, g, t);
  }
  for (int first = begin + turn; first < end; first += kAhead * kTurns) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (first + j * kTurns >= end) continue;
      multiply_step<T, Columns>(lane_table, ring[j], sums);
      const int next = first + (j + kAhead) * kTurns;
      if (next < end) load_step<T, DQ, Columns>(ring[j], a, next, from, g, t);
    }
  }
  add_turns<Columns>(sums, side, turn, reinterpret_cast<float*>(table));
  if (turn != 0 || column >= a.K) return;
#pragma unroll
  for (int c = 0; c < Columns; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // (2 i; 2 t), (2 i; 2 t + 1), (2 i + 1; 2 t), (2 i + 1; 2 t + 1)
        const int m = 8 * c + 2 * t + e % 2, k = column + 2 * i + e / 2;
        if (m >= a.M) continue;
        if (gridDim.y == 1) {
          store_sum<T>(a.target, m, k, sums[i][c][e]);
        } else {
          a.partial[(int64_t(blockIdx.y) * a.M + m) * a.K + k] = sums[i][c][e];
        }
      }
    }
  }
}

using Kernel = void (*)(BackwardArgs);

template <class T>
Kernel kernel_for(bool dq, bool wide) {
  if (wide) return dq ? linear_backward_small_kernel<T, true, 2> : linear_backward_small_kernel<T, false, 2>;
  return dq ? linear_backward_small_kernel<T, true, 1> : linear_backward_small_kernel<T, false, 1>;
}

template <class T>
cudaError_t launch_as(const BackwardArgs& args, bool dq, int64_t tiles, int64_t splits, cudaStream_t stream) {
  const Kernel kernel = kernel_for<T>(dq, args.M > 8);
  const cudaError_t error = launch(kernel, unsigned(tiles), unsigned(splits), kThreads, 0, stream, args);
  return error != cudaSuccess || splits == 1 ? error : add_splits<T>(args.target, args.partial, args.M, splits, stream);
}

}  // namespace

int64_t linear_backward_small_splits(int64_t N, int64_t K) { return backward_splits(N, K, multiprocessors()); }

cudaError_t launch_linear_backward_small(const PackedProduct& p, cudaStream_t stream) {
  const RowLayout& layout = p.layout;
  BackwardArgs args{};
  args.grad = p.input;
  args.packed = p.packed;
  args.target = sum_target(p, layout.in_features);
  args.partial = p.partial;
  args.M = int(p.M);
  args.N = int(p.N);
  args.K = int(layout.in_features);
  args.row_bytes = int(layout.row_bytes);
  args.scales_offset = int(layout.scales_offset);
  args.code_bytes = int(layout.code_bytes);
  args.steps = int((p.N + kBackwardRows - 1) / kBackwardRows);
  args.steps_per_split = int((args.steps + p.splits - 1) / p.splits);
  while (int64_t(1) << args.block_shift < layout.block_size) ++args.block_shift;
  args.codebook = codebook_of(layout);
  const int64_t tiles = (layout.in_features + kBackwardColumns - 1) / kBackwardColumns;
  const bool dq = is_double_quantized(layout.format);
  return p.dtype == DType::kBFloat16 ? launch_as<BFloat16>(args, dq, tiles, p.splits, stream)
                                     : launch_as<Float16>(args, dq, tiles, p.splits, stream);
}

}  // namespace halfbyte::cuda
