// linear for 65..256 rows of bf16 or fp16 input on compute capability 9.0 (linear_route.h: kWgmmaM), by wgmma_pipeline.h: an
// output is a row of packed. (Scales on the sums, as in linear_tiled.cu, would need sums per block: 64 x 256 of them are 128
// registers a thread already.)
//
// Lane 4 g + t needs byte t of every word of codes of its rows g and g + 8: four lanes read the same 16 bytes, in one access.
//
// What limits it, in cycles of a multiprocessor for a step (128 x 64 weights) of 64, 128 or 256 rows of input:
//   tensor cores    256   512   1024    128 x 64 x rows / 2048
//   shared memory   548   740   1124    256 of look-ups (8 bytes for 2 weights), 64 of codes, 128 / 256 / 512 of B, read by both
//                                       warpgroups, 100 / 164 / 292 of writing input, codes and scales
//   L2              449   737   1311    12.5, 20.5, 36.5 KB at 28.5 bytes: 112 multiprocessors and an assumed 5.6 TB/s
//   issue slots     347   392    469    instructions of two warps (benchmarks/sass_counts.py)
// So shared memory and L2 come before the tensor cores, by about a quarter at 256 rows; a cluster of CTAs that share their input (a
// multicast) would lift the second. On an H100 a step takes 1220, 1450 and 2010 cycles (benchmarks/README.md, "gpu": linear by route,
// 14336 x 4096, at 1.755 GHz), the start and the sums' way out in them: each warp waits for its own results, and 2 of them a scheduler
// are too few (csrc/README.md).
#include "wgmma_pipeline.h"

namespace halfbyte::cuda {
namespace {

// Codes of a stage: 32 bytes of each of 128 rows of packed; scales: a word of each. Rows past N repeat the last one; their sums
// are not stored.
template <class T, bool DQ>
class RowWeights {
 public:
  static constexpr int kScaleBytes = int(kWgmmaRows) * 4;
  HALFBYTE_HD static constexpr int place(int output) { return output; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(HALFBYTE_EMULATE_CUDA)
  __device__ RowWeights(const WgmmaArgs& a, uint32_t first) {
    const auto row_of = [&](int r) {
      const uint32_t n = first + uint32_t(r), N = uint32_t(a.N);
      return a.packed + int64_t(n < N ? n : N - 1) * a.layout.row_bytes;
    };
    const int thread = int(threadIdx.x), filled = thread / 2, half = thread % 2, g = thread % 32 / 4;
    codes_ = kept(row_of(filled) + half * 16);
    codes_at_ = filled * kRow + (half ^ (filled / 4 % 2)) * 16;  // 8 rows' units are all 8 places of a line
    scales_ = kept(row_of(thread % int(kWgmmaRows)) + (DQ ? a.layout.code_bytes : a.layout.scales_offset));
    row_ = thread / 32 * 16 + g;
    first_unit_ = g / 4 * 16;
    if constexpr (DQ) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* constants = reinterpret_cast<const float*>(row_of(row_ + 8 * i) + a.layout.scales_offset);
        step_[i] = constants[0];
        low_[i] = constants[1];
      }
    }
  }
  __device__ void fill(const WgmmaArgs& a, uint8_t* codes, uint8_t* scales, int step) const {
    copy_async(codes + codes_at_, codes_ + step * int64_t(kRow), true);
    if (threadIdx.x < kWgmmaRows) {
      const uint32_t block = uint32_t(step) >> a.block_shift;  // -dq: the word that holds the block's byte
      copy_async_4(scales + int(threadIdx.x) * 4, scales_ + (DQ ? block & ~3u : block * 4), true);
    }
  }
  __device__ void decode(const WgmmaArgs& a, const PairTable& table, const uint8_t* codes, const uint8_t* scales, int step,
                         uint32_t (&w)[kChunkSteps][4]) const {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(scales) + row_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float scale = bits_float(words[8 * i]);
      if constexpr (DQ) {
        const uint32_t byte = (uint32_t(step) >> a.block_shift) % 4;
        scale = fma_rn(float(words[8 * i] >> (8 * byte) & 255u), step_[i], low_[i]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 unit = *reinterpret_cast<const uint4*>(codes + (row_ + 8 * i) * kRow + (first_unit_ ^ (16 * half)));
        const uint32_t word[4] = {unit.x, unit.y, unit.z, unit.w};  // of elements 32 half + 8 j .. + 7
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = table.at(word[j]);
          w[2 * half + j / 2][i + j % 2 * 2] = packed_pair<T>(mul_rn(pair.x, scale), mul_rn(pair.y, scale));
        }
      }
    }
  }

 private:
  static constexpr int kRow = int(kSmallChunk) / 2;
  const uint8_t *codes_, *scales_;
  int codes_at_, row_, first_unit_;
  float step_[2], low_[2];  // -dq
#endif
};

}  // namespace

bool linear_wgmma_available() {
#if defined(HALFBYTE_HAVE_SM90A) || defined(HALFBYTE_EMULATE_CUDA)
  return compute_capability() == 90;  // code for sm_90a runs on 9.0 and nowhere else
#else
  return false;
#endif
}

int64_t linear_wgmma_splits(int64_t N, int64_t K) { return wgmma_splits(N, K, multiprocessors()); }

cudaError_t launch_linear_wgmma(const PackedProduct& p, cudaStream_t stream) {
  return launch_wgmma<RowWeights>(p, linear_args(p), p.layout.in_features, stream);
}

}  // namespace halfbyte::cuda
