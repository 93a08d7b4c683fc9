// linear_backward_input for few rows of bf16 or fp16 gradients (linear_route.h: kBackwardM): packed weights go straight into
// tensor core fragments.
//
// D^T = W^T G^T with mma.m16n8k16, the sum over the N rows of packed. A fragment register wants two rows' values of one column;
// a byte of packed is two columns of one row. So the nibbles of two rows' words are interleaved first (4 instructions for 16
// weights) and a byte of that is one look-up in linear_fragments.h's table. The order of rows inside a step of 16 is free as long
// as W and G agree: lane 4 g + t takes rows 4 t .. 4 t + 3 (8 bytes of gradient) and columns 16 g .. 16 g + 15 (8 bytes a row).
//
//   a CTA: 256 columns (2 sides, so that 128 bytes of a row are read together) x a range of rows (4 warps in turn) x up to 32
//   rows of grad
//
// Each row has its own scale for a block of columns, which the sum over rows cannot leave outside: a pair of values is multiplied
// by its two rows' scales as 16-bit numbers. Codebook, scale and product are rounded: 3 * 2^-8 (bf16) or 3 * 2^-11 (fp16)
// relative per weight at most. The warps that take turns and the splits of N are added in a fixed order.
#include "linear_fragments.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostColumns = int(kBackwardM) / 8;
constexpr int kWarpColumns = 128;             // of one warp: 16 a lane, 8 lanes
constexpr int kSide = int(kBackwardColumns) / kWarpColumns;  // warps side by side
constexpr int kTurns = kThreads / 32 / kSide;                // warps a side: they take steps in turn
static_assert(kSide == 2 && kTurns == 4);

// input is grad (M, N), 8-byte aligned rows as those of packed; N a multiple of 4, K of 16. A step is 16 rows of packed.
using BackwardArgs = ProductArgs;

// What a lane needs of one step, as loaded: 16 columns of 4 rows, their scales, and the gradients of these rows. Nothing is
// computed of it before it is needed, or its loads would be waited for.
template <bool DQ, int Columns>
struct Step {
  static constexpr int kAhead = DQ && Columns == 2 ? 1 : 2;  // steps in flight a warp, 1 KB each: as many as registers hold
  uint2 codes[4];
  uint32_t scale[4];           // float, or the uint8 code of -dq
  float step[4], low[4];       // -dq
  uint2 grad[Columns];

  // Rows past N repeat the last 4. Columns past K and gradient rows past M repeat the last ones; their sums are not stored.
  template <class T>
  __device__ void load(const BackwardArgs& a, int number, int column, int g, int t) {
    const int wanted = number * 16 + 4 * t, n = wanted < a.N ? wanted : a.N - 4;
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      const int m = g + 8 * c < a.M ? g + 8 * c : a.M - 1;
      grad[c] = __ldg(reinterpret_cast<const uint2*>(static_cast<const T*>(a.input) + m * int64_t(a.N) + n));
    }
    const uint8_t* row = a.packed + n * a.layout.row_bytes;
    const int block = column >> a.block_shift;
#pragma unroll
    for (int r = 0; r < 4; ++r, row += a.layout.row_bytes) {
      codes[r] = load_once(row + column / 2);
      const float* scales = reinterpret_cast<const float*>(row + a.layout.scales_offset);
      if constexpr (DQ) step[r] = __ldg(scales), low[r] = __ldg(scales + 1);
      scale[r] = DQ ? __ldg(row + a.layout.code_bytes + block) : __ldg(reinterpret_cast<const uint32_t*>(scales) + block);
    }
  }
  // Scales of rows 2 r and 2 r + 1 in 16 bits.
  template <class T>
  __device__ uint32_t scales(int r) const {
    uint32_t pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      pair[i] = bits16<T>(DQ ? fma_rn(float(scale[2 * r + i]), step[2 * r + i], low[2 * r + i]) : bits_float(scale[2 * r + i]));
    return pair[0] | pair[1] << 16;
  }
};

// sums[i] += the product of columns 2 i (rows g of the fragment) and 2 i + 1 (rows g + 8) of the lane's 16.
// `there`: the lane's rows exist; else gradients are 0.
template <class T, bool DQ, int Columns>
__device__ inline void multiply_step(const LaneTable& table, const Step<DQ, Columns>& s, bool there, float (&sums)[8][Columns][4]) {
  const uint32_t scales[2] = {s.template scales<T>(0), s.template scales<T>(1)};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t even[2], odd[2];  // per pair of rows: byte i is column 2 i (or 2 i + 1) of both, the first row in the high nibble
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint2 one = s.codes[2 * r], two = s.codes[2 * r + 1];
      const uint32_t first = half ? one.y : one.x, second = half ? two.y : two.x;
      even[r] = (first & 0xF0F0F0F0u) | ((second >> 4) & 0x0F0F0F0Fu);
      odd[r] = ((first << 4) & 0xF0F0F0F0u) | (second & 0x0F0F0F0Fu);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t w[4] = {multiply_pair<T>(table.decode(even[0], i), scales[0]),
                             multiply_pair<T>(table.decode(odd[0], i), scales[0]),
                             multiply_pair<T>(table.decode(even[1], i), scales[1]),
                             multiply_pair<T>(table.decode(odd[1], i), scales[1])};
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
        const uint32_t b[2] = {there ? s.grad[c].x : 0, there ? s.grad[c].y : 0};
        mma_m16n8k16<T>(sums[4 * half + i][c], w, b);
      }
    }
  }
}

// Adds the sums of 4 neighbouring warps in the order ((0 + 1) + (2 + 3)); turn 0 has them afterwards. `shared` has room for half of
// 64 sums of every thread.
template <int Columns>
__device__ inline void add_turns(float (&sums)[8][Columns][4], int turn, float* shared) {
  constexpr int kCount = 8 * Columns * 4, kPiece = kCount < 64 ? kCount : 64;
  float* flat = &sums[0][0][0];
  for (int distance = 1; distance < kTurns; distance *= 2) {
    // Of every pair of warps at `distance`, in the order of the first of the two: 4 slots at most.
    const int warp = int(threadIdx.x / 32), slot = (warp - turn) / 2 + turn / (2 * distance);
    float* at = shared + slot * (kPiece * 32) + int(threadIdx.x % 32);
#pragma unroll
    for (int piece = 0; piece < kCount; piece += kPiece) {
      __syncthreads();
      if (turn % (2 * distance) == distance) {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) at[i * 32] = flat[piece + i];
      }
      __syncthreads();
      if (turn % (2 * distance) == 0) {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) flat[piece + i] += at[i * 32];
      }
    }
  }
}

// Columns: 1 for M <= 8, 2 for M <= 16, else 4.
template <class T, bool DQ, int Columns>
__global__ void __launch_bounds__(kThreads, Columns == kMostColumns ? 1 : int(kSmallResident))
    linear_backward_kernel(const BackwardArgs a) {
  __shared__ uint32_t table[kTableWords];
  static_assert(kTableWords >= kThreads / 2 * (Columns < 2 ? 32 : 64));  // add_turns takes the table's place
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32), g = lane / 4, t = lane % 4;
  const int turn = warp % kTurns, side = warp / kTurns;
  fill_byte_table<T>(a.codebook, table);
  __syncthreads();
  const LaneTable lane_table(table);
  const int column = int(blockIdx.x) * int(kBackwardColumns) + side * kWarpColumns + 16 * g;
  const int K = int(a.layout.in_features), from = column < K ? column : K - 16;
  const int begin = a.begin() + turn, end = a.end();
  float sums[8][Columns][4] = {};
  constexpr int kAhead = Step<DQ, Columns>::kAhead;
  Step<DQ, Columns> ring[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    if (begin + j * kTurns < end) ring[j].template load<T>(a, begin + j * kTurns, from, g, t);
  }
  for (int step = begin; step < end; step += kAhead * kTurns) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int now = step + j * kTurns, next = now + kAhead * kTurns;
      if (now >= end) continue;
      multiply_step<T, DQ, Columns>(lane_table, ring[j], now * 16 + 4 * t < a.N, sums);
      if (next < end) ring[j].template load<T>(a, next, from, g, t);
    }
  }
  add_turns<Columns>(sums, turn, reinterpret_cast<float*>(table));
  if (turn != 0 || column >= K) return;
#pragma unroll
  for (int c = 0; c < Columns; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // (2 i; 2 t), (2 i; 2 t + 1), (2 i + 1; 2 t), (2 i + 1; 2 t + 1)
        const int m = 8 * c + 2 * t + e % 2, k = column + 2 * i + e / 2;
        if (m >= a.M) continue;
        leave_sum<T>(a, m, k, sums[i][c][e]);
      }
    }
  }
}

template <class T, bool DQ>
KernelChoice<BackwardArgs> choose(int M) {
  if (M <= 8) return {linear_backward_kernel<T, DQ, 1>, 0};
  if (M <= 16) return {linear_backward_kernel<T, DQ, 2>, 0};
  return {linear_backward_kernel<T, DQ, kMostColumns>, 0};
}

}  // namespace

int64_t linear_backward_small_splits(int64_t N, int64_t K) { return backward_splits(N, K, multiprocessors(), kSmallResident); }
int64_t linear_backward_tiled_splits(int64_t N, int64_t K) { return backward_splits(N, K, multiprocessors(), 1); }

cudaError_t launch_linear_backward(const PackedProduct& p, cudaStream_t stream) {
  const int64_t columns = p.layout.in_features;
  const BackwardArgs args = product_args(p, columns, p.N, kBackwardRows, 1);
  const cudaError_t error = launch_splits(p, args, (columns + kBackwardColumns - 1) / kBackwardColumns, kThreads, stream,
                                          [&]<class T, bool DQ>() { return choose<T, DQ>(args.M); });
  return error != cudaSuccess ? error : add_splits(p, args, stream);
}

}  // namespace halfbyte::cuda
