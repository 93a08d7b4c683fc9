// linear for 33..256 rows of bf16 or fp16 input on compute capability 9.0, 512 of large weights (linear_route.h: kWgmmaM), by
// wgmma_pipeline.h: an output is a row of packed. (Scales on the sums, as in linear_tiled.cu, would need sums per block: 64 x 256 of
// them are 128 registers a thread already.)
//
// Lane 4 g + t needs byte t of every word of codes of its rows g and g + 8: four lanes read the same 16 bytes, in one access. Codes and
// scales are copied a quad of 4 steps at a time: a row's codes are a line then, and its scales one copy. A copy of a step's 32 bytes
// costs as much as that of the line, and the scales of 128 rows 128 lines: of 64 rows of input that was a third of all.
//
// What limits it is L1's data path. Wavefronts (cycles of it) for a step of 128 x 64 weights of 64, 128 or 256 rows of input, as `ncu`
// counted them on an H100, beside what else takes cycles there:
//   look-ups            256   256   256    8 bytes for 2 weights
//   B                   128   256   512    read by both warpgroups of a step
//   copies              128   192   320    input 64 / 128 / 256, codes 32, scales 32
//   codes, scales, sums 100   116   116    read by the decoding lanes; the sums' way out, shared out over 64 steps
//   together            612   820  1204
//   tensor cores        256   512  1024    128 x 64 x rows / 2048
//   L2                  449   737  1311    12.5, 20.5, 36.5 KB at 28.5 bytes: 112 multiprocessors and an assumed 5.6 TB/s
// A step takes 950, 1230 and 1770 cycles (benchmarks/README.md, "gpu": 14336 x 4096, at 1.755 GHz; start and end of the kernel in
// them). Copies by the bulk tensor engine would take input off that path, and a cluster that shares it off L2's.
#include "wgmma_pipeline.h"

namespace halfbyte::cuda {
namespace {

// A quad: 128 bytes of codes of each of 128 rows of packed, and the 16 bytes (-dq: 4) that have its scales. Rows past N repeat the last
// one; their sums are not stored.
template <class T, bool DQ, int Groups>
class RowWeights {
 public:
  static constexpr int kGroups = Groups, kThreads = Groups * kGroupThreads, kSteps = 4;
  static constexpr int kRowScales = DQ ? 4 : 16;
  static constexpr int kScaleBytes = int(kWgmmaRows) * kRowScales;
  HALFBYTE_HD static constexpr int place(int output) { return output; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(HALFBYTE_EMULATE_CUDA)
  __device__ RowWeights(const WgmmaArgs& a, uint32_t first) : first_(first) {
    const int thread = int(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) codes_[i] = units_to(a, thread / kUnits + i * kCopiedRows) + uint32_t(thread % kUnits);
    scales_ = units_to(a, copied_scale(thread));
    row_ = thread % kGroupThreads / 32 * 16 + thread % 32 / 4;
    if constexpr (DQ) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* constants = reinterpret_cast<const float*>(tile(a) + units_to(a, row_ + 8 * i) * int64_t(16) + a.layout.scales_offset);
        step_[i] = constants[0];
        low_[i] = constants[1];
      }
    }
  }
  __device__ void fill(const WgmmaArgs& a, uint8_t* codes, uint8_t* scales, int step, bool wanted) const {
    const int thread = int(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = thread / kUnits + i * kCopiedRows, unit = thread % kUnits;  // 8 rows' units are all 8 places of a line
      const int at = step * kStepRow;
      copy_async(codes + row * kRow + (unit ^ (row % 8)) * 16, tile(a) + codes_[i] * int64_t(16) + at,
                 at + unit * 16 < a.layout.code_bytes, wanted);
    }
    if (thread % 32 < kScaleLanes) {
      const uint32_t block = (uint32_t(step) >> a.block_shift) & ~3u;
      const uint8_t* const row = tile(a) + scales_ * int64_t(16);
      uint8_t* const to = scales + copied_scale(thread) * kRowScales;
      if constexpr (DQ) copy_async_4(to, row + a.layout.code_bytes + block, true, wanted);
      else copy_async(to, row + a.layout.scales_offset + block * 4, true, wanted);
    }
  }
  __device__ void decode(const WgmmaArgs& a, const PairTable& table, const uint8_t* codes, const uint8_t* scales, int step,
                         uint32_t (&w)[kChunkSteps][4]) const {
    const uint32_t block = uint32_t(step) >> a.block_shift & 3u;  // of those that the quad's copy has
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float scale;
      if constexpr (DQ) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(scales)[row_ + 8 * i];
        scale = fma_rn(float(word >> (8 * block) & 255u), step_[i], low_[i]);
      } else {
        scale = reinterpret_cast<const float*>(scales)[(row_ + 8 * i) * 4 + int(block)];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int unit = (step % 4 * 2 + half) ^ (row_ % 8);
        const uint4 codes16 = *reinterpret_cast<const uint4*>(codes + (row_ + 8 * i) * kRow + unit * 16);
        const uint32_t word[4] = {codes16.x, codes16.y, codes16.z, codes16.w};  // of elements 32 half + 8 j .. + 7
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = table.at(word[j]);
          w[2 * half + j / 2][i + j % 2 * 2] = packed_pair<T>(mul_rn(pair.x, scale), mul_rn(pair.y, scale));
        }
      }
    }
  }

 private:
  static constexpr int kStepRow = int(kSmallChunk) / 2, kRow = kSteps * kStepRow, kUnits = kRow / 16;  // of a row: bytes, copies
  static constexpr int kCopiedRows = kThreads / kUnits, kCopies = int(kWgmmaRows) / kCopiedRows;
  static constexpr int kScaleLanes = int(kWgmmaRows) / (kThreads / 32);  // every warp copies scales: each is a line of its own
  // The row whose scales a thread copies, of the first kScaleLanes of a warp.
  __device__ static int copied_scale(int thread) { return thread / 32 * kScaleLanes + thread % kScaleLanes; }
  __device__ const uint8_t* tile(const WgmmaArgs& a) const { return a.packed + int64_t(first_) * a.layout.row_bytes; }
  // Units of 16 bytes from there to a row, or to the last one: 32 bits do, and no thread keeps a pointer.
  __device__ uint32_t units_to(const WgmmaArgs& a, int row) const {
    const uint32_t last = uint32_t(a.N) - 1 - first_;
    return (uint32_t(row) < last ? uint32_t(row) : last) * uint32_t(a.layout.row_bytes / 16);
  }

  uint32_t first_, codes_[kCopies], scales_;
  int row_;
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
  return launch_wgmma<RowWeights, 128>(p, product_args(p, p.N, p.layout.in_features, kWgmmaQuad, kSmallChunk),
                                       p.layout.in_features, stream);
}

}  // namespace halfbyte::cuda
