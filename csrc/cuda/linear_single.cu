// linear for one row of bf16 or fp16 input: linear_small.cu's products and sums, bit for bit, from a ring in shared memory.
//
// What is read once from memory and what is read again and again must not meet in one queue: L1 answers loads in their order, so a load
// of input that finds its line there still waits for the codes asked for before it, all the way to memory: with codes in a ring and input
// loaded, `ncu` found warps waiting for input, and nothing gained. So codes, scales and input of a round, 4 steps or a line of each of 16
// rows, all come by `cp.async`, and the loop reads nothing but shared memory.
//
//   a warp's ring: kRounds of | 16 rows x 128 bytes of codes | 16 x 4 words of scales | 256 elements of input |
//
// More rows of input would leave room for fewer rounds (4: one CTA a multiprocessor instead of two).
#include "linear_steps.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = int(kSmallWarps) * 32;
constexpr int kRoundSteps = 4, kRounds = 3;
constexpr int kStride = kRoundSteps * int(kSmallWarps);  // steps from a warp's round to its next
constexpr int kRowCodes = kRoundSteps * int(kSmallChunk) / 2;
constexpr int kScalesAt = int(kSmallRows) * kRowCodes, kInputAt = kScalesAt + int(kSmallRows) * kRoundSteps * 4;
constexpr int kRoundBytes = kInputAt + kRoundSteps * int(kSmallChunk) * 2;
constexpr int kSumsAt = kTableWords * 4, kRingsAt = kSumsAt + int(kSmallWarps * kSmallRows) * 4;  // of a CTA
constexpr int kSharedBytes = kRingsAt + int(kSmallWarps) * kRounds * kRoundBytes;
static_assert(kSmallResident * (kSharedBytes + 1024) <= 228 * 1024);

// Input and rows of packed are 16-byte aligned.
struct SingleArgs : ProductArgs {
  uint32_t tiles;
};

// Fills a warp's ring, in the order in which it multiplies: rounds of a tile of 16 rows of packed, tile after tile. Rows past N repeat
// the last one; their sums are not stored. The 16-byte unit u of a row of codes lies at u ^ 2 (row % 4): the 32 bytes that a step reads
// of 4 rows are all banks.
template <class T, bool DQ>
class RoundFill {
 public:
  __device__ RoundFill(int first, int end, uint8_t* ring) : ring_(ring), tile_(blockIdx.x), first_(first), chunk_(first), end_(end) {}

  // The next round, as one group of copies.
  __device__ void operator()(const SingleArgs& a, int round) {
    const int lane = int(threadIdx.x % 32);
    if (tile_ < a.tiles && first_ < end_) {
      uint8_t* const to = ring_ + round * kRoundBytes;
      const uint8_t* const rows = a.packed + int64_t(tile_) * kSmallRows * a.layout.row_bytes;
      const int last = a.N - 1 - int(tile_ * uint32_t(kSmallRows));
      const auto row_of = [&](int row) { return rows + (row < last ? row : last) * a.layout.row_bytes; };
      const int unit = lane % 8, step = lane % 4;
#pragma unroll
      for (int row = lane / 8; row < int(kSmallRows); row += 4)
        copy_async(to + row * kRowCodes + (unit ^ (row % 4 * 2)) * 16, row_of(row) + chunk_ * int64_t(kSmallChunk / 2) + unit * 16,
                   chunk_ + unit / 2 < end_);
      const uint32_t block = uint32_t(chunk_ + step) >> a.block_shift;  // -dq: the word that holds the block's byte
      const int64_t scale = DQ ? a.layout.code_bytes + (block & ~3u) : a.layout.scales_offset + block * 4;
#pragma unroll
      for (int row = lane / 4; row < int(kSmallRows); row += 8)
        copy_async_4(to + kScalesAt + (row * kRoundSteps + step) * 4, row_of(row) + scale, chunk_ + step < end_);
      const T* const input = static_cast<const T*>(a.input) + chunk_ * kSmallChunk + lane * 8;
      copy_async(to + kInputAt + lane * 16, input, chunk_ + lane / 8 < end_);
      chunk_ += kStride;
      if (chunk_ >= end_) {
        chunk_ = first_;
        tile_ += gridDim.x;
      }
    }
    copy_async_commit();
  }

 private:
  uint8_t* ring_;
  uint32_t tile_;
  int first_, chunk_, end_;
};

template <class T, bool DQ>
__global__ void __launch_bounds__(kThreads, int(kSmallResident)) linear_single_kernel(const SingleArgs a) {
  uint8_t* const shared = dynamic_shared<uint8_t>();
  uint32_t* const table = reinterpret_cast<uint32_t*>(shared);
  float* const partial = reinterpret_cast<float*>(shared + kSumsAt);  // (warps, 16)
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32), g = lane / 4, t = lane % 4;
  const int first = a.begin() + warp * kRoundSteps, end = a.end();
  uint8_t* const ring = shared + kRingsAt + warp * kRounds * kRoundBytes;
  RoundFill<T, DQ> fill(first, end, ring);
#pragma unroll
  for (int i = 0; i < kRounds - 1; ++i) fill(a, i);
  fill_byte_table<T>(a.codebook, table);
  __syncthreads();
  const LaneTable lane_table(table);
  int round = 0;
  for (uint32_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    float step_size[2] = {}, low[2] = {};  // -dq
    if constexpr (DQ) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t n = tile * uint32_t(kSmallRows) + uint32_t(g + 8 * i), last = uint32_t(a.N) - 1;
        const uint8_t* const row = a.packed + int64_t(n < last ? n : last) * a.layout.row_bytes + a.layout.scales_offset;
        step_size[i] = *reinterpret_cast<const float*>(row);
        low[i] = *reinterpret_cast<const float*>(row + 4);
      }
    }
    float sums[4] = {};
    for (int chunk = first; chunk < end; chunk += kStride) {
      copy_async_wait<kRounds - 2>();
      __syncwarp();  // the round has arrived, the one before has been read by the warp
      fill(a, round == 0 ? kRounds - 1 : round - 1);
      const uint8_t* const from = ring + round * kRoundBytes;
      round = round + 1 == kRounds ? 0 : round + 1;
#pragma unroll
      for (int j = 0; j < kRoundSteps; ++j) {
        if (chunk + j >= end) continue;
        uint2 codes[2];  // as linear_small.cu shares out a step: lanes 0, 2, 1, 3 of a row have 8 bytes each
        StepScales scale;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = g + 8 * i, unit = (2 * j + t % 2) ^ (row % 4 * 2);
          codes[i] = *reinterpret_cast<const uint2*>(from + row * kRowCodes + unit * 16 + t / 2 * 8);
          const uint32_t word = *reinterpret_cast<const uint32_t*>(from + kScalesAt + (row * kRoundSteps + j) * 4);
          if constexpr (DQ) {
            const uint32_t byte = (uint32_t(chunk + j) >> a.block_shift) % 4;
            scale.row[i] = fma_rn(float(word >> (8 * byte) & 255u), step_size[i], low[i]);
          } else {
            scale.row[i] = bits_float(word);
          }
        }
        Activations x = {};
        if (g == 0) {
          const uint4* const input = reinterpret_cast<const uint4*>(from + kInputAt) + j * 8 + t % 2 * 4 + t / 2 * 2;
          x = {{input[0], input[1]}};
        }
        multiply_step<T>(StepWeights(lane_table, codes), scale, x, sums);
      }
    }
    if (t == 0) {  // the column of the one row of input
      partial[warp * int(kSmallRows) + g] = sums[0];
      partial[warp * int(kSmallRows) + g + 8] = sums[2];
    }
    __syncthreads();
    const uint32_t n = tile * uint32_t(kSmallRows) + threadIdx.x;
    if (threadIdx.x < kSmallRows && n < uint32_t(a.N)) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < int(kSmallWarps); ++w) sum += partial[w * int(kSmallRows) + int(threadIdx.x)];
      leave_sum<T>(a, 0, n, sum);
    }
    __syncthreads();  // `partial` is free again
  }
  copy_async_wait<0>();
}

}  // namespace

cudaError_t launch_linear_single(const PackedProduct& p, cudaStream_t stream) {
  const SmallPlan plan = small_plan(p.N, p.layout.in_features, multiprocessors());
  const SingleArgs args{linear_args(p), uint32_t(plan.tiles)};
  const cudaError_t error = launch_splits(p, args, plan.grid, kThreads, stream, [&]<class T, bool DQ>() {
    return KernelChoice<SingleArgs>{linear_single_kernel<T, DQ>, kSharedBytes};
  });
  return error != cudaSuccess ? error : add_splits(p, args, stream);
}

}  // namespace halfbyte::cuda
