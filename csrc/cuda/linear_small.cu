// linear for M = 2..16 rows of bf16 or fp16 input (one: linear_single.cu): packed weights go straight into tensor core fragments
// (linear_steps.h).
//
// A byte becomes two 16-bit values by a table of 256 words, replicated per bank (32 KB): no conflict, and 1 instruction a weight
// with the address (LaneTable). 4 steps a warp are loaded ahead, the next tile's before this one's sums meet: 2 KB a warp, 32 KB
// a multiprocessor, where 4.3 TB/s at 0.7 us need 23; activations one step.
//
// The look-ups are half of what L1's data path can do (a wavefront a cycle; measured on an H100: 64 % busy, memory 45 %, when each
// step loaded 8 bytes of codes and a scale a lane). A load of 8 rows takes 8 wavefronts, however little of each it wants, so a lane
// loads 16 bytes of codes, of one of two steps, and exchanges half of them with lane t ^ 2:
//
//   bytes of two steps, row g:  | t=0: 0-15 | t=1: 16-31 | t=2: 32-47 | t=3: 48-63 |
//   after it, of each step:     | t=0: 0-7  | t=2: 8-15  | t=1: 16-23 | t=3: 24-31 |   and the elements of input alike
//
// and the scale of one of 4 steps, which the lanes of its row get by a shuffle.
#include "linear_steps.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = int(kSmallWarps) * 32;
constexpr int kPairs = 2;           // of steps in flight a warp
constexpr int kAhead = 2 * kPairs;  // steps

// Rows of input and of packed are 16-byte aligned.
struct SmallArgs : ProductArgs {
  uint32_t tiles;
};

// A lane's part of 16 rows: codes of rows g and g + 8, and scales of every fourth step.
template <bool DQ>
class PairSource {
 public:
  // From step `first` on. Rows past N repeat the last one; their sums are not stored.
  __device__ PairSource(const SmallArgs& a, uint32_t tile, int first, int g, int t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t n = tile * uint32_t(kSmallRows) + uint32_t(g + 8 * i);
      const uint8_t* row = a.packed + int64_t(n < uint32_t(a.N) ? n : uint32_t(a.N) - 1) * a.layout.row_bytes;
      codes_[i] = kept(row + first * int(kSmallChunk / 2) + 16 * t);
      scales_[i] = kept(row + (DQ ? a.layout.code_bytes : a.layout.scales_offset));
      if constexpr (DQ) {
        step_[i] = *reinterpret_cast<const float*>(row + a.layout.scales_offset);
        low_[i] = *reinterpret_cast<const float*>(row + a.layout.scales_offset + 4);
      }
    }
  }
  __device__ void advance(int steps) {
#pragma unroll
    for (int i = 0; i < 2; ++i) codes_[i] = kept(codes_[i] + steps * int(kSmallChunk / 2));
  }
  // The lane's 16 bytes of the two steps `ahead` of where this points; zeros where its step does not exist.
  __device__ void load(uint4 (&codes)[2], int ahead, bool exists) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      codes[i] = make_uint4(0, 0, 0, 0);
      if (exists) codes[i] = load_once_16(codes_[i] + ahead * int(kSmallChunk / 2));
    }
  }
  __device__ void load_scales(uint32_t (&scales)[2], int step, int block_shift) const {
    const uint32_t block = uint32_t(step) >> block_shift;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      scales[i] = DQ ? __ldg(scales_[i] + block) : __ldg(reinterpret_cast<const uint32_t*>(scales_[i]) + block);
  }
  __device__ float scale(uint32_t loaded, int i) const {
    return DQ ? fma_rn(float(loaded), step_[i], low_[i]) : bits_float(loaded);
  }

 private:
  const uint8_t *codes_[2], *scales_[2];
  float step_[2], low_[2];  // -dq
};

// The codes of two steps from what the lanes of a row loaded of them.
__device__ inline void exchange(const uint4 (&loaded)[2], bool upper, uint2 (&first)[2], uint2 (&second)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4& v = loaded[i];
    const uint2 mine = upper ? make_uint2(v.z, v.w) : make_uint2(v.x, v.y);
    const uint2 theirs = make_uint2(__shfl_xor_sync(0xFFFFFFFFu, upper ? v.x : v.z, 2), __shfl_xor_sync(0xFFFFFFFFu, upper ? v.y : v.w, 2));
    first[i] = upper ? theirs : mine;
    second[i] = upper ? mine : theirs;
  }
}

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
  const bool upper = t >= 2;
  // A round of a warp is 4 steps in a row: 128 bytes, a whole line, of each of its 16 rows. Steps past the range are not loaded, and
  // not multiplied either.
  constexpr int kRound = kAhead * int(kSmallWarps);
  const int first = a.begin() + warp * kAhead, end = a.end();
  uint4 ring[kPairs][2];
  uint32_t scales[2] = {};
  const auto load = [&](const PairSource<DQ>& from, int p, int chunk, int ahead) {
    if (chunk < end) from.load(ring[p], ahead, chunk + upper < end);
  };
  const auto fill = [&](const PairSource<DQ>& from) {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) load(from, p, first + 2 * p, 2 * p);
    if (first + t < end) from.load_scales(scales, first + t, a.block_shift);
  };
  PairSource<DQ> from(a, blockIdx.x, first, g, t);
  fill(from);
  fill_byte_table<T>(a.codebook, table);
  __syncthreads();
  const LaneTable lane_table(table);
  for (uint32_t tile = blockIdx.x; tile < a.tiles;) {
    const T* input[Columns];
    Activations x[Columns] = {};  // of rows past M: zeros
    const auto load_input = [&](int ahead) {
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
        if (g + 8 * c < a.M) x[c] = load_activations(input[c] + ahead * int(kSmallChunk));
      }
    };
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      const int m = g + 8 * c < a.M ? g + 8 * c : 0;
      input[c] = kept(static_cast<const T*>(a.input) + m * a.layout.in_features + first * int64_t(kSmallChunk) + t % 2 * 32 + t / 2 * 16);
    }
    if (first < end) load_input(0);
    float sums[Columns][4] = {};
    for (int chunk = first; chunk < end; chunk += kRound) {
      const float row_scale[2] = {from.scale(scales[0], 0), from.scale(scales[1], 1)};  // of step chunk + t
      if (chunk + kRound + t < end) from.load_scales(scales, chunk + kRound + t, a.block_shift);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        if (chunk + 2 * p >= end) continue;
        uint2 steps[2][2];  // of each step, the codes of rows g and g + 8
        exchange(ring[p], upper, steps[0], steps[1]);
        load(from, p, chunk + 2 * p + kRound, 2 * p + kRound);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int j = 2 * p + h;
          if (chunk + j >= end) continue;
          Activations now[Columns];
#pragma unroll
          for (int c = 0; c < Columns; ++c) now[c] = x[c];
          const int ahead = j + 1 < kAhead ? j + 1 : kRound;
          if (chunk + ahead < end) load_input(ahead);
          const StepWeights w(lane_table, steps[h]);
          StepScales scale;
#pragma unroll
          for (int i = 0; i < 2; ++i) scale.row[i] = __shfl_sync(0xFFFFFFFFu, row_scale[i], (lane & ~3) | j);
#pragma unroll
          for (int c = 0; c < Columns; ++c) multiply_step<T>(w, scale, now[c], sums[c]);
        }
      }
      from.advance(kRound);
#pragma unroll
      for (int c = 0; c < Columns; ++c) input[c] = kept(input[c] + kRound * kSmallChunk);
    }
    const uint32_t done = tile;
    tile += gridDim.x;
    if (tile < a.tiles) {  // the next tile's codes are on their way while the warps wait for each other
      from = PairSource<DQ>(a, tile, first, g, t);
      fill(from);
    }
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) partial[warp][c * 8 + 2 * t + i % 2][g + 8 * (i / 2)] = sums[c][i];
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < Columns * 8 * int(kSmallRows); i += kThreads) {
      const int m = i / int(kSmallRows), r = i % int(kSmallRows);
      const uint32_t n = done * uint32_t(kSmallRows) + uint32_t(r);
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
  if (p.M == 1) return launch_linear_single(p, stream);
  const SmallPlan plan = small_plan(p.N, p.layout.in_features, multiprocessors());
  const SmallArgs args{linear_args(p), uint32_t(plan.tiles)};
  const cudaError_t error =
      launch_splits(p, args, plan.grid, kThreads, stream, [&]<class T, bool DQ>() { return choose<T, DQ>(args.M); });
  return error != cudaSuccess ? error : add_splits(p, args, stream);
}

}  // namespace halfbyte::cuda
