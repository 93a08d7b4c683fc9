// What the forward kernels share: a warp's step of 64 elements of K for 16 rows of packed, from memory to tensor cores. How a lane
// comes by its codes and scales is linear_tiled.cu's here (StepSource); linear_small.cu has its own.
//
// D^T = W X^T with mma.m16n8k16: one byte of a packed row is one A register (k, k+1), so nothing is repacked. The order of k
// inside a step of 64 elements is free as long as W and X agree: lane 4 g + t takes bytes 8 t .. 8 t + 7 of rows g and g + 8
// (one 8-byte load a row, 32 contiguous bytes a quad) and elements 16 t .. 16 t + 15 of input row g (two 16-byte loads).
//
//   step of 64 elements, row g:  | t=0: 16 elements | t=1: 16 | t=2: 16 | t=3: 16 |   4 mma, one scale
//
// Codebook values are rounded to 16 bits, scales multiply the fp32 sums: an error of 2^-8 (bf16) or 2^-11 (fp16) relative per
// weight, as when a dense weight is rounded.
#pragma once

#include "linear_fragments.h"

namespace halfbyte::cuda {

// One lane's part of a step.
struct Step {
  uint2 codes[2];     // of rows g and g + 8
  uint32_t scale[2];  // as loaded: StepSource::scales_of makes floats of them where they are needed, so that no load is waited for
};

struct StepScales {
  float row[2];
};

// Where a lane's part of 16 rows begins. Rows past N repeat the last one; their sums are not stored. Scales (float, or the uint8 codes
// of -dq) are found from the pointers of the codes: 3 instructions a scale, where pointers of their own would take 4 registers.
template <bool DQ>
struct StepSource {
  const uint8_t* codes[2];
  uint32_t distance;      // from codes to scales
  float step[2], low[2];  // -dq

  __device__ StepSource(const uint8_t* packed, const RowLayout& layout, uint32_t N, uint32_t first_row, int g, int t) {
    distance = uint32_t(DQ ? layout.code_bytes : layout.scales_offset) - uint32_t(8 * t);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t n = first_row + uint32_t(g + 8 * i);
      const uint8_t* row = packed + int64_t(n < N ? n : N - 1) * layout.row_bytes;
      codes[i] = row + 8 * t;
      if constexpr (DQ) {
        step[i] = *reinterpret_cast<const float*>(row + layout.scales_offset);
        low[i] = *reinterpret_cast<const float*>(row + layout.scales_offset + 4);
      }
    }
  }
  __device__ void advance(int chunks) {
#pragma unroll
    for (int i = 0; i < 2; ++i) codes[i] += chunks * int64_t(kSmallChunk / 2);
    distance -= uint32_t(chunks) * uint32_t(kSmallChunk / 2);
  }
  // The step `ahead` of where this points, chunk number `chunk` of the row; a block is 2^block_shift chunks.
  __device__ void load(Step& s, int ahead, int chunk, int block_shift) const {
    constexpr uint32_t kBytes = DQ ? 1 : 4;
    const uint32_t block = uint32_t(chunk) >> block_shift;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s.codes[i] = load_once(codes[i] + ahead * int(kSmallChunk / 2));
      const uint8_t* scale = codes[i] + (distance + block * kBytes);
      s.scale[i] = DQ ? __ldg(scale) : __ldg(reinterpret_cast<const uint32_t*>(scale));
    }
  }
  __device__ StepScales scales_of(const Step& s) const {
    StepScales result;
#pragma unroll
    for (int i = 0; i < 2; ++i) result.row[i] = DQ ? fma_rn(float(s.scale[i]), step[i], low[i]) : bits_float(s.scale[i]);
    return result;
  }
};

// The weights of a step as four A operands: of bytes 2 i and 2 i + 1 of the lane's 8 of rows g and g + 8.
struct StepWeights {
  uint32_t mma[4][4];

  __device__ StepWeights(const LaneTable& table, const uint2 (&codes)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t upper = i < 2 ? codes[0].x : codes[0].y, lower = i < 2 ? codes[1].x : codes[1].y;
      const int byte = i % 2 * 2;
      mma[i][0] = table.decode(upper, byte);
      mma[i][1] = table.decode(lower, byte);
      mma[i][2] = table.decode(upper, byte + 1);
      mma[i][3] = table.decode(lower, byte + 1);
    }
  }
};

// 16 elements of one input row.
struct Activations {
  uint4 half[2];
};

// sums += scale * (W X^T) over one step, for 8 columns of X.
template <class T>
__device__ inline void multiply_step(const StepWeights& w, const StepScales& scale, const Activations& x, float (&sums)[4]) {
  float d[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4& v = x.half[i / 2];
    const uint32_t b[2] = {i % 2 ? v.z : v.x, i % 2 ? v.w : v.y};
    mma_m16n8k16<T>(d, w.mma[i], b);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = fma_rn(d[i], scale.row[i / 2], sums[i]);
}

}  // namespace halfbyte::cuda
