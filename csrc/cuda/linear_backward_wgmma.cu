// linear_backward_input for 17..256 rows of bf16 or fp16 gradients on compute capability 9.0 (linear_route.h: kBackwardWgmmaM),
// by wgmma_pipeline.h: an output is a column of packed, the reduction goes over its rows.
//
//   D^T = W^T G^T; a stage: 64 rows x 128 columns of packed, the gradients of these 64 rows
//
// A register of the A operand wants two rows' values of one column. `ldmatrix` with .trans gives lane 4 g + t the 16-bit elements
// g, 4 columns, of rows 2 t and 2 t + 1, the lower in the lower half; each warpgroup takes one byte of them, 2 columns. Nibbles of
// the two rows are interleaved (8 instructions for 16 weights), a byte of that is one look-up. Each row has its own scale.
//
//   column of warp w, lane 4 g + t of warpgroup h: 32 w + 4 g + 2 h is row g of its 16, the next column is row g + 8
//
// What limits it, in cycles of a multiprocessor for a step (64 x 128 weights) of 64, 128 or 256 rows of gradients:
//   tensor cores    256   512   1024    128 x 64 x rows / 2048
//   shared memory   616   808   1192    256 of look-ups (8 bytes for 2 weights); 64 of codes, 64 of scales (-dq: 192) and 128 /
//                                       256 / 512 of B, read by both warpgroups; 104 / 168 / 296 of writing input, codes, scales
//   L2              576   905   1563    14, 22, 38 KB (a sector of 32 bytes for each row's scales) at 24.9 bytes: 128
//                                       multiprocessors and an assumed 5.6 TB/s
//   issue slots     399   444    521    instructions of two warps (benchmarks/sass_counts.py; -dq: 546, 595, 667)
// So L2 comes first, as in linear_wgmma.cu. Decoding into shared memory for a transposed operand (A from shared memory) needs no
// interleaving, but 128 cycles to write 16 KB of weights and 128 to read them.
// ptxas: 134 to 250 registers, no spills. One group a CTA: with two, 128 registers a thread are too few, and reloads of spilled ones wait
// behind copies: it was slower for any number of rows.
#include "wgmma_pipeline.h"

namespace halfbyte::cuda {
namespace {

// Codes of a stage: 64 bytes of each of 64 rows; scales: a word for each unit of 16 bytes, or the word that has the bytes of all
// 4, step and low of -dq. Of rows past N scales are 0, and so are the weights. Columns past K have any; their sums are not stored.
template <class T, bool DQ, int Groups>
class ColumnWeights {
 public:
  static constexpr int kPitch = int(kSmallChunk) + 8;  // words of a kind of scales: the filling threads' 4 x 8 are all banks
  static constexpr int kGroups = Groups, kThreads = Groups * kGroupThreads, kSteps = Groups;
  static constexpr int kStepScales = (DQ ? 3 : 4) * kPitch * 4, kScaleBytes = kSteps * kStepScales;
  HALFBYTE_HD static constexpr int place(int output) {
    const int warp = output / 32, g = output / 4 % 8, warpgroup = output / 2 % 2;
    return 64 * warpgroup + 16 * warp + 8 * (output % 2) + g;
  }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(HALFBYTE_EMULATE_CUDA)
  __device__ ColumnWeights(const WgmmaArgs& a, uint32_t first) {
    const int thread = int(threadIdx.x), lane = thread % 32;
    row_ = thread / 4;
    unit_ = thread % 4;
    const uint32_t column = first + uint32_t(32 * unit_);
    exists_ = int64_t(column) < a.layout.in_features;
    const uint8_t* const row = a.packed + row_ * a.layout.row_bytes;
    codes_ = kept(row + column / 2);
    const int64_t words = a.layout.scales_offset + (DQ ? unit_ - 1 : int(column >> a.block_shift)) * 4;
    scales_ = kept(row + (DQ && unit_ == 0 ? a.layout.code_bytes + ((first >> a.block_shift) & ~3u) : words));
    codes_at_ = row_ * kRow + (unit_ ^ (row_ / 2 % 4)) * 16;  // 8 rows' units are all 8 places of a line
    scales_at_ = row_ / int(kSmallChunk) * kStepScales + (unit_ * kPitch + row_ % int(kSmallChunk)) * 4;
    const int mine = thread / 32 % 4;  // a warp's unit
    from_ = lane * kRow + (mine ^ (lane / 2 % 4)) * 16;
    scales_from_ = (DQ ? 0 : mine * kPitch) + lane % 4 * 2;
    bytes_ = 0x6240u + 0x1111u * uint32_t(thread / 128 % 2);
    if constexpr (DQ) byte_ = 0x7440u + ((first + uint32_t(32 * mine)) >> a.block_shift) % 4;
  }
  __device__ void fill(const WgmmaArgs& a, uint8_t* codes, uint8_t* scales, int step, bool wanted) const {
    const bool within = step * int(kSmallChunk) + row_ < a.N;
    const int64_t ahead = within ? step * kSmallChunk * a.layout.row_bytes : 0;
    copy_async(codes + codes_at_, codes_ + ahead, within && exists_, wanted);
    if (!DQ || unit_ < 3) copy_async_4(scales + scales_at_, scales_ + ahead, within && (DQ || exists_), wanted);
  }
  __device__ void decode(const WgmmaArgs&, const PairTable& table, const uint8_t* codes, const uint8_t* scales, int step,
                         uint32_t (&w)[kChunkSteps][4]) const {
    codes += step % kSteps * kStepCodes;
    scales += step % kSteps * kStepScales;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t rows[4];  // 32 half + 8 i + 2 t in the lower half, + 2 t + 1 in the upper
      load_matrices_transposed(codes + from_ + half * 32 * kRow, rows);
      const uint32_t low = __byte_perm(rows[0], rows[1], bytes_), high = __byte_perm(rows[2], rows[3], bytes_);
      const uint32_t one = __byte_perm(low, high, 0x5410), two = __byte_perm(low, high, 0x7632);  // rows 2 t, 2 t + 1
      const uint32_t columns[2] = {(one & 0xF0F0F0F0u) | ((two >> 4) & 0x0F0F0F0Fu),
                                   ((one << 4) & 0xF0F0F0F0u) | (two & 0x0F0F0F0Fu)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 scale = scales_of(scales, 32 * half + 8 * i);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float2 pair = table.at(columns[c], i);
          w[2 * half + i / 2][i % 2 * 2 + c] = packed_pair<T>(mul_rn(pair.x, scale.x), mul_rn(pair.y, scale.y));
        }
      }
    }
  }

 private:
  static constexpr int kRow = int(kWgmmaRows) / 2;
  // Of rows `row` + 2 t and the next.
  __device__ float2 scales_of(const uint8_t* scales, int row) const {
    const float* const words = reinterpret_cast<const float*>(scales) + scales_from_ + row;
    const float2 stored = *reinterpret_cast<const float2*>(words);
    if constexpr (!DQ) return stored;
    const float2 step = *reinterpret_cast<const float2*>(words + kPitch);
    const float2 low = *reinterpret_cast<const float2*>(words + 2 * kPitch);
    return make_float2(fma_rn(code_of(stored.x), step.x, low.x), fma_rn(code_of(stored.y), step.y, low.y));
  }
  // The block's byte as a float: the last of the mantissa of 2^23 + byte.
  __device__ float code_of(float word) const {
    return sub_rn(bits_float(__byte_perm(float_bits(word), 0x4B000000u, byte_)), 0x1p23f);
  }

  const uint8_t *codes_, *scales_;
  int row_, unit_, codes_at_, scales_at_, from_, scales_from_;
  uint32_t bytes_, byte_;  // selectors of the warpgroup's bytes, of the block's byte in its word
  bool exists_;
#endif
};

}  // namespace

int64_t linear_backward_wgmma_splits(int64_t N, int64_t K) { return backward_wgmma_splits(N, K, multiprocessors()); }

cudaError_t launch_linear_backward_wgmma(const PackedProduct& p, cudaStream_t stream) {
  return launch_wgmma<ColumnWeights, 0>(p, product_args(p, p.layout.in_features, p.N, kWgmmaQuad, 1), p.N, stream);
}

}  // namespace halfbyte::cuda
