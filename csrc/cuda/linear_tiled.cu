// linear for M = 17..128 rows of bf16 or fp16 input, 17..32 where there is wgmma (linear_route.h: kTiledM, kBesideWgmmaM): packed
// weights go straight into tensor core fragments (linear_steps.h) and meet all rows of input there.
//
//   a CTA: 256 rows of packed (8 warps x 32) x up to 128 rows of input x a range of K (one split)
//
// Every weight is read and decoded once, by the lane whose fragment it belongs to. Input goes through shared memory: `cp.async`
// fills a ring of 4 rounds of 16 KB, a round being 4, 2 or 1 steps of 64 elements for up to 32, 64 or 128 rows; 3 rounds are in
// flight while one is multiplied, and one barrier a round separates them. Of a row's 128 bytes, the 16-byte unit u lies at
// u ^ (row & 1): a quarter warp reads units 2 t + h of two rows, which then are all 8 places of a line, so that neither these
// reads nor the fill conflict. Weights are loaded a round ahead into registers: 8 KB a step and CTA.
//
// What limits it, for 256 x 64 weights and 64 (128) rows of input on a multiprocessor of an H100: tensor cores with 512 (1024)
// instructions a quarter of it, 832 (1664) cycles at the 62 % of peak that mma.sync reaches there [Luo et al. 2024,
// arXiv:2402.13499]; shared memory with 256 cycles of look-ups and 512 (1024) of reading input. Look-ups that nothing overlaps
// leave 77 % (87 %) of the first; wgmma lifts it (linear_wgmma.cu). Registers allow one CTA: 8 warps a multiprocessor.
#include "linear_steps.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpRows = int(kTiledRows) / (kThreads / 32);
constexpr int kTiles = kWarpRows / 16;  // fragments of 16 rows a warp
constexpr int kSlots = 4;               // rounds in shared memory
constexpr int kMostRows = 128;          // of input a launch; more of them take several
constexpr int kStepUnits = int(kSmallChunk) / 8;  // 16-byte units of one row of input in a step
static_assert(kTiles == 2 && kStepUnits == 8);

// Steps a round: few columns make short steps.
constexpr int round_steps(int columns) { return columns <= 4 ? 4 : columns <= 8 ? 2 : 1; }
// Bytes of input in shared memory: at most 64 KB, which with the table fits the 99 KB of compute capability 8.6 and 8.9.
constexpr int shared_bytes(int columns) { return kSlots * round_steps(columns) * columns * 8 * kStepUnits * 16; }
static_assert(shared_bytes(16) == 65536 && shared_bytes(8) == 65536 && shared_bytes(4) == 65536);

// Sums leave through the ring's memory, 32 rows of input at a time, so that a warp stores 32 neighbours. 4 words of padding
// keep the lanes' 4 t x 8 g apart.
constexpr int kGroup = 4, kTurnedPitch = int(kTiledRows) + 4;
static_assert(kGroup * 8 * kTurnedPitch * 4 <= shared_bytes(4));

// Rows of input are 16-byte aligned, rows of packed 8-byte.
struct TiledArgs : ProductArgs {
  int first, rows;  // this launch's rows of input, at most 8 * Columns of them
};

// A thread's share of filling the ring: unit `unit` of a round, of every kStride-th row of input from `row` on. What does not
// exist is filled with zeros.
template <class T, int Columns>
struct RingFill {
  static constexpr int kRound = round_steps(Columns), kStride = kThreads / (kStepUnits * kRound), kRows = 8 * Columns;
  static_assert(kStride % 2 == 0 && kRows % kStride == 0);
  const T* source;
  int rows, step, offset;

  __device__ explicit RingFill(const TiledArgs& a) {
    const int unit = int(threadIdx.x) % (kStepUnits * kRound), row = int(threadIdx.x) / (kStepUnits * kRound);
    step = unit / kStepUnits;
    rows = a.rows - row;
    source = kept(static_cast<const T*>(a.input) + (a.first + (rows > 0 ? row : 0)) * a.layout.in_features + unit * 8);
    offset = (step * kRows + row) * kStepUnits + ((unit % kStepUnits) ^ (row & 1));
  }
  // Steps `chunk` .. chunk + kRound - 1 into the round at `slot`.
  __device__ void operator()(const TiledArgs& a, uint4* slot, int chunk, int end) const {
#pragma unroll
    for (int i = 0; i < kRows / kStride; ++i) {
      const bool there = i * kStride < rows && chunk + step < end;
      const T* from = there ? source + i * kStride * a.layout.in_features + chunk * kSmallChunk : source;
      copy_async(slot + offset + i * kStride * kStepUnits, from, there);
    }
    copy_async_commit();
  }
};

// Columns: of 8 rows of input each.
template <class T, bool DQ, int Columns>
__global__ void __launch_bounds__(kThreads, 1) linear_tiled_kernel(const TiledArgs a) {
  using Fill = RingFill<T, Columns>;
  constexpr int kRound = Fill::kRound, kSlotUnits = kRound * Fill::kRows * kStepUnits;
  __shared__ uint32_t table[kTableWords];
  uint4* const ring = dynamic_shared<uint4>();
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32), g = lane / 4, t = lane % 4;
  const uint32_t first_row = blockIdx.x * uint32_t(kTiledRows) + uint32_t(warp * kWarpRows);
  const int begin = a.begin(), end = a.end();

  const Fill fill(a);
#pragma unroll
  for (int s = 0; s < kSlots - 1; ++s) fill(a, ring + s * kSlotUnits, begin + s * kRound, end);
  StepSource<DQ> from[kTiles] = {{a.packed, a.layout, uint32_t(a.N), first_row, g, t},
                                        {a.packed, a.layout, uint32_t(a.N), first_row + 16, g, t}};
  Step ahead[kRound][kTiles];
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    from[r].advance(begin);
#pragma unroll
    for (int j = 0; j < kRound; ++j) {
      if (begin + j < end) from[r].load(ahead[j][r], j, begin + j, a.block_shift);
    }
  }
  fill_byte_table<T>(a.codebook, table);
  __syncthreads();
  const LaneTable lane_table(table);
  const int lane_unit = g * kStepUnits + (2 * t ^ (g & 1));  // of row g; the lane's other unit is at lane_unit ^ 1
  float sums[kTiles][Columns][4] = {};
  int slot = 0;
  for (int first = begin; first < end; first += kRound) {
#pragma unroll
    for (int j = 0; j < kRound; ++j) {
      if (first + j >= end) continue;
      const StepWeights w[kTiles] = {{lane_table, ahead[j][0].codes}, {lane_table, ahead[j][1].codes}};
      const StepScales scales[kTiles] = {from[0].scales_of(ahead[j][0]), from[1].scales_of(ahead[j][1])};
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        if (first + j + kRound < end) from[r].load(ahead[j][r], j + kRound, first + j + kRound, a.block_shift);
      }
      if (j == 0) {  // decoding needs no input: warps that are done with the last round begin this one
        copy_async_wait<kSlots - 2>();
        __syncthreads();  // this round has arrived, the one before has been read by everyone
        fill(a, ring + (slot + kSlots - 1) % kSlots * kSlotUnits, first + (kSlots - 1) * kRound, end);
      }
#pragma unroll
      for (int group = 0; group < Columns; group += kGroup) {
        if (group > 0 && 8 * group >= a.rows) break;
#pragma unroll
        for (int c = group; c < group + kGroup; ++c) {
          const uint4* at = ring + slot * kSlotUnits + (j * Fill::kRows + 8 * c) * kStepUnits;
          const Activations x = {{at[lane_unit], at[lane_unit ^ 1]}};
#pragma unroll
          for (int r = 0; r < kTiles; ++r) multiply_step<T>(w[r], scales[r], x, sums[r][c]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kTiles; ++r) from[r].advance(kRound);
    slot = (slot + 1) % kSlots;
  }
  copy_async_wait<0>();
  float* const turned = reinterpret_cast<float*>(ring);
  const uint32_t n = blockIdx.x * uint32_t(kTiledRows) + threadIdx.x;
#pragma unroll
  for (int pass = 0; pass < Columns / kGroup; ++pass) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTiles * kGroup * 4; ++i) {
      const int r = i / (kGroup * 4), c = i / 4 % kGroup, token = 8 * c + 2 * t + i % 2;
      turned[token * kTurnedPitch + warp * kWarpRows + 16 * r + g + 8 * (i % 4 / 2)] = sums[r][pass * kGroup + c][i % 4];
    }
    __syncthreads();
    const int first = pass * kGroup * 8, past = first + kGroup * 8 < a.rows ? first + kGroup * 8 : a.rows;
    if (n >= uint32_t(a.N)) continue;
    for (int token = first; token < past; ++token) {
      const float sum = turned[(token - first) * kTurnedPitch + threadIdx.x];
      const int m = a.first + token;
      leave_sum<T>(a, m, n, sum);
    }
  }
}

template <class T, bool DQ>
KernelChoice<TiledArgs> choose(int rows) {
  if (rows <= 32) return {linear_tiled_kernel<T, DQ, 4>, shared_bytes(4)};
  if (rows <= 64) return {linear_tiled_kernel<T, DQ, 8>, shared_bytes(8)};
  return {linear_tiled_kernel<T, DQ, 16>, shared_bytes(16)};
}

}  // namespace

int64_t linear_tiled_splits(int64_t N, int64_t K) { return tiled_splits(N, K, multiprocessors()); }

cudaError_t launch_linear_tiled(const PackedProduct& p, cudaStream_t stream) {
  TiledArgs args{linear_args(p), 0, 0};
  for (; args.first < args.M; args.first += args.rows) {
    args.rows = args.M - args.first < kMostRows ? args.M - args.first : kMostRows;
    const cudaError_t error = launch_splits(p, args, (p.N + kTiledRows - 1) / kTiledRows, kThreads, stream,
                                            [&]<class T, bool DQ>() { return choose<T, DQ>(args.rows); });
    if (error != cudaSuccess) return error;
  }
  return add_splits(p, args, stream);
}

}  // namespace halfbyte::cuda
