// linear for 65..256 rows of bf16 or fp16 input on compute capability 9.0 (linear_route.h: kWgmmaM): packed weights become the A
// operand of wgmma in registers, all rows of input are B in shared memory.
//
//   D^T = W X^T; a CTA: 128 rows of packed (2 warpgroups x 64) x up to 256 rows of input x a range of K (one split)
//
// Every weight is read and decoded once a CTA, by the lane whose fragment it belongs to, and is then what dequantize gives:
// codebook value times scale in fp32, rounded once. (Scales on the sums, as in linear_tiled.cu, would need sums per block: 64 x 256
// of them are 128 registers a thread already.) A stage of the ring is one step of 64 elements: input in the swizzled layout of wgmma.h, 32
// bytes of codes and a word with the scale of each of the 128 rows, all by `cp.async`. Weights of the next step are decoded while
// wgmma multiplies this one; fragments of two steps are kept, so that a group of 4 wgmma is always running:
//
//   wgmma step s | wait for step s - 1 | stage s + 1 is there, stage s - 1 is free: fill it | decode s + 1 | wgmma step s + 1 ...
//
// Lane 4 g + t needs byte t of every word of codes of its rows g and g + 8: four lanes read the same 16 bytes, in one access.
//
// What limits it, in cycles of a multiprocessor for a step (128 x 64 weights) of 64, 128 or 256 rows of input:
//   tensor cores    256   512   1024    128 x 64 x rows / 2048
//   shared memory   548   740   1124    256 of look-ups (8 bytes for 2 weights), 64 of codes, 128 / 256 / 512 of B, read by both
//                                       warpgroups, 100 / 164 / 292 of writing input, codes and scales
//   L2              449   737   1311    12.5, 20.5, 36.5 KB at 28.5 bytes: 112 multiprocessors and an assumed 5.6 TB/s
//   issue slots     340   385    486    instructions of two warps (benchmarks/sass_counts.py)
// So shared memory and L2 come before the tensor cores, by about a quarter at 256 rows;
// a cluster of CTAs that share their input (a multicast) would lift the second.
#include "linear_fragments.h"
#include "wgmma.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunkBytes = int(kSmallChunk) / 2;  // of codes of a row in a step
constexpr int kPairs = 256 * 16;                   // entries of the table
constexpr int kTurnedPitch = int(kWgmmaRows) + 4;  // keeps the lanes' 4 t x 8 g apart
static_assert(kWgmmaRows == kThreads / 2 && kSwizzledRow == kSmallChunk * 2);

// Shared memory, from a multiple of 1024 bytes on: the ring's input, its codes, its scales, the table. Sums leave through the ring.
template <int Tokens>
struct Shared {
  static constexpr int kSlots = Tokens <= 128 ? 8 : Tokens <= 192 ? 6 : 5;
  static constexpr int kInput = Tokens * int(kSwizzledRow), kCodes = int(kWgmmaRows) * kChunkBytes, kScales = int(kWgmmaRows) * 4;
  static constexpr int kCodesAt = kSlots * kInput, kScalesAt = kCodesAt + kSlots * kCodes, kTableAt = kScalesAt + kSlots * kScales;
  static constexpr int kBytes = kTableAt + kPairs * 8 + 1024;
  static_assert(kInput % kSwizzledPattern == 0 && kBytes <= 227 * 1024 && Tokens * kTurnedPitch * 4 <= kTableAt);
};

// Rows of input and of packed are 16-byte aligned.
struct WgmmaArgs : ProductArgs {
  int token_tiles, tile_tokens;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(HALFBYTE_EMULATE_CUDA)

constexpr int kChunkSteps = int(kSmallChunk) / 16;  // wgmma a step

// table[byte][copy] = the values of the byte's two codes, the high nibble first. Called by 256 threads, one entry each.
__device__ inline void fill_pair_table(const Codebook16& book, float2* table) {
  const int byte = int(threadIdx.x);
  const float2 pair = make_float2(book.value[byte >> 4], book.value[byte & 15]);
#pragma unroll 4
  for (int j = 0; j < 16; ++j) table[byte * 16 + ((j + byte) & 15)] = pair;
}

// Two values in one register, the first in the lower half.
template <class T>
__device__ inline uint32_t packed_pair(float first, float second) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, BFloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    memcpy(&bits, &pair, 4);
  } else {
    const __half2 pair = __floats2half2_rn(first, second);
    memcpy(&bits, &pair, 4);
  }
  return bits;
}

// A thread's share of filling a stage: one 16-byte unit of every 32nd row of input, one of the codes of a row of packed, and, of
// half of the threads, a row's scale. Rows of packed past N repeat the last one; their sums are not stored.
template <class T, bool DQ, int Tokens>
struct StageFill {
  using S = Shared<Tokens>;
  const T* input;
  const uint8_t *codes, *scales;
  int rows, input_at, codes_at;

  __device__ StageFill(const WgmmaArgs& a, int first_token, int tokens, uint32_t first_row) {
    const int thread = int(threadIdx.x), token = thread / 8, unit = thread % 8;
    rows = tokens - token;
    input = kept(static_cast<const T*>(a.input) + (first_token + (rows > 0 ? token : 0)) * a.layout.in_features + unit * 8);
    input_at = token * int(kSwizzledRow) + (unit ^ (token % 8)) * 16;
    const auto row_of = [&](int r) {
      const uint32_t n = first_row + uint32_t(r);
      return a.packed + int64_t(n < uint32_t(a.N) ? n : uint32_t(a.N) - 1) * a.layout.row_bytes;
    };
    const int row = thread / 2, half = thread % 2;
    codes = kept(row_of(row) + half * 16);
    codes_at = row * kChunkBytes + (half ^ (row / 4 % 2)) * 16;  // 8 rows' units are all 8 places of a line
    scales = kept(row_of(thread % int(kWgmmaRows)) + (DQ ? a.layout.code_bytes : a.layout.scales_offset));
  }
  // Step `chunk` into a slot, as one group of copies.
  __device__ void operator()(const WgmmaArgs& a, uint8_t* shared, int slot, int chunk, bool there) const {
    if (there) {
      uint8_t* const to = shared + slot * S::kInput + input_at;
#pragma unroll
      for (int i = 0; i < Tokens / 32; ++i) {
        const bool exists = i * 32 < rows;  // zeros otherwise
        copy_async(to + i * 32 * int(kSwizzledRow), exists ? input + i * 32 * a.layout.in_features + chunk * kSmallChunk : input,
                   exists);
      }
      copy_async(shared + S::kCodesAt + slot * S::kCodes + codes_at, codes + chunk * int64_t(kChunkBytes), true);
      if (threadIdx.x < kWgmmaRows) {
        const uint32_t block = uint32_t(chunk) >> a.block_shift;  // -dq: the word that holds the block's byte
        copy_async_4(shared + S::kScalesAt + slot * S::kScales + int(threadIdx.x) * 4, scales + (DQ ? block & ~3u : block * 4));
      }
    }
    copy_async_commit();
  }
};

// A lane's weights of a stage, rows g and g + 8 of its warp's 16, as A operands.
template <class T, bool DQ, int Tokens>
struct Decoder {
  using S = Shared<Tokens>;
  PairTable table;
  int row, first_unit;
  float step[2], low[2];  // -dq

  __device__ Decoder(const WgmmaArgs& a, const uint8_t* shared, uint32_t first_row)
      : table(reinterpret_cast<const float2*>(shared + S::kTableAt), int(threadIdx.x) % 4) {
    const int g = int(threadIdx.x) % 32 / 4;
    row = int(threadIdx.x) / 32 * 16 + g;
    first_unit = g / 4 * 16;
    if constexpr (DQ) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t n = first_row + uint32_t(row + 8 * i);
        const uint8_t* constants = a.packed + int64_t(n < uint32_t(a.N) ? n : uint32_t(a.N) - 1) * a.layout.row_bytes + a.layout.scales_offset;
        step[i] = *reinterpret_cast<const float*>(constants);
        low[i] = *reinterpret_cast<const float*>(constants + 4);
      }
    }
  }
  __device__ void operator()(const WgmmaArgs& a, const uint8_t* shared, int slot, int chunk, uint32_t (&w)[kChunkSteps][4]) const {
    const uint8_t* const codes = shared + S::kCodesAt + slot * S::kCodes + row * kChunkBytes;
    const uint32_t* const scales = reinterpret_cast<const uint32_t*>(shared + S::kScalesAt + slot * S::kScales) + row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float scale = bits_float(scales[8 * i]);
      if constexpr (DQ) {
        const uint32_t byte = (uint32_t(chunk) >> a.block_shift) % 4;
        scale = fma_rn(float(scales[8 * i] >> (8 * byte) & 255u), step[i], low[i]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 words = *reinterpret_cast<const uint4*>(codes + 8 * i * kChunkBytes + (first_unit ^ (16 * half)));
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};  // of elements 32 half + 8 j .. + 7
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = table.at(word[j]);
          w[2 * half + j / 2][i + j % 2 * 2] = packed_pair<T>(mul_rn(pair.x, scale), mul_rn(pair.y, scale));
        }
      }
    }
  }
};

template <class T, bool DQ, int Tokens>
__device__ inline void multiply(const WgmmaArgs& a) {
  using S = Shared<Tokens>;
  uint8_t* shared = dynamic_shared<uint8_t>();
  shared += (0u - shared_address(shared)) % kSwizzledPattern;
  const int first_token = int(blockIdx.x) % a.token_tiles * a.tile_tokens;
  const int tokens = a.M - first_token < a.tile_tokens ? a.M - first_token : a.tile_tokens;
  const uint32_t first_row = blockIdx.x / uint32_t(a.token_tiles) * uint32_t(kWgmmaRows);
  const int begin = a.begin(), end = a.end();

  const StageFill<T, DQ, Tokens> fill(a, first_token, tokens, first_row);
#pragma unroll
  for (int s = 0; s < S::kSlots - 1; ++s) fill(a, shared, s, begin + s, begin + s < end);
  fill_pair_table(a.codebook, reinterpret_cast<float2*>(shared + S::kTableAt));
  const Decoder<T, DQ, Tokens> decode(a, shared, first_row);
  float sums[Tokens / 2] = {};
  uint32_t even[kChunkSteps][4] = {}, odd[kChunkSteps][4] = {};
  const uint64_t input = swizzled_descriptor(shared_address(shared));
  int slot = 0;  // of the step at hand
  // Multiplies step s, whose weights are `now`, and decodes the one after it into `next`.
  const auto step = [&](int s, uint32_t (&now)[kChunkSteps][4], uint32_t (&next)[kChunkSteps][4]) {
    wgmma_fence(sums, now);
#pragma unroll
    for (int c = 0; c < kChunkSteps; ++c)
      wgmma<T>(sums, now[c], input + uint64_t(uint32_t(slot * (S::kInput >> 4))) + c * kDescriptorK16);
    wgmma_commit();
    wgmma_wait<1>(sums);  // step s - 1 is done: `next` is free
    const int before = slot == 0 ? S::kSlots - 1 : slot - 1;
    slot = slot + 1 == S::kSlots ? 0 : slot + 1;
    if (s + 1 >= end) return;
    copy_async_wait<S::kSlots - 3>();
    fence_async_proxy();
    __syncthreads();  // stage s + 1 has arrived, stage s - 1 has been read by everyone
    fill(a, shared, before, s + S::kSlots - 1, s + S::kSlots - 1 < end);
    decode(a, shared, slot, s + 1, next);
  };
  copy_async_wait<S::kSlots - 2>();
  fence_async_proxy();
  __syncthreads();
  if (begin < end) decode(a, shared, 0, begin, even);
  for (int s = begin; s < end; s += 2) {
    step(s, even, odd);
    if (s + 1 < end) step(s + 1, odd, even);
  }
  wgmma_wait<0>(sums);
  copy_async_wait<0>();
  __syncthreads();  // the ring has been read by everyone
  float* const turned = reinterpret_cast<float*>(shared);  // (tokens, 128 rows)
  const int lane = int(threadIdx.x) % 32, row = int(threadIdx.x) / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < Tokens / 2; ++i)
    turned[(i / 4 * 8 + lane % 4 * 2 + i % 2) * kTurnedPitch + row + i / 2 % 2 * 8] = sums[i];
  __syncthreads();
  const int r = int(threadIdx.x) % int(kWgmmaRows);
  const uint32_t n = first_row + uint32_t(r);
  if (n >= uint32_t(a.N)) return;
  for (int token = int(threadIdx.x) / int(kWgmmaRows); token < tokens; token += kThreads / int(kWgmmaRows)) {
    const float sum = turned[token * kTurnedPitch + r];
    const int m = first_token + token;
    leave_sum<T>(a, m, n, sum);
  }
}

#endif

template <class T, bool DQ, int Tokens>
__global__ void __launch_bounds__(kThreads, 1) linear_wgmma_kernel(const WgmmaArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(HALFBYTE_EMULATE_CUDA)
  multiply<T, DQ, Tokens>(a);
#else
  HALFBYTE_DEVICE_ASSERT(a.M < 0);  // linear_route.h sends nothing to this architecture
#endif
}

template <class T, bool DQ>
KernelChoice<WgmmaArgs> choose(int tokens) {
  if (tokens <= 64) return {linear_wgmma_kernel<T, DQ, 64>, Shared<64>::kBytes};
  if (tokens <= 128) return {linear_wgmma_kernel<T, DQ, 128>, Shared<128>::kBytes};
  if (tokens <= 192) return {linear_wgmma_kernel<T, DQ, 192>, Shared<192>::kBytes};
  return {linear_wgmma_kernel<T, DQ, 256>, Shared<256>::kBytes};
}

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
  const int64_t token_tiles = (p.M + kWgmmaTokens - 1) / kWgmmaTokens, tile_tokens = (p.M + token_tiles - 1) / token_tiles;
  const WgmmaArgs args{linear_args(p), int(token_tiles), int(tile_tokens)};
  const cudaError_t error = launch_splits(p, args, (p.N + kWgmmaRows - 1) / kWgmmaRows * token_tiles, kThreads, stream,
                                          [&]<class T, bool DQ>() { return choose<T, DQ>(args.tile_tokens); });
  return error != cudaSuccess ? error : add_splits(p, args, stream);
}

}  // namespace halfbyte::cuda
