// Products of packed weights by wgmma (compute capability 9.0): what linear_wgmma.cu and linear_backward_wgmma.cu share.
//
//   D^T = W X^T; a CTA: 128 outputs (2 warpgroups x 64) x up to 256 rows of input x a range of the reduction (one split)
//
// Weights become the A operand in registers, all rows of input are B in shared memory. Every weight is read and decoded once
// a CTA, by the lane whose fragment it belongs to, and is then what dequantize gives: codebook value times scale in fp32,
// rounded once. A stage of the ring is one step of 64 elements of the reduction: input in the swizzled layout of wgmma.h, 4 KB of
// codes and their scales, all by `cp.async`. Weights of the next step are decoded while wgmma multiplies this one; fragments of
// two steps are kept, so that a group of 4 wgmma is always running:
//
//   wgmma step s | wait for step s - 1 | stage s + 1 is there, stage s - 1 is free: fill it | decode s + 1 | wgmma step s + 1 ...
//
// What differs is a class Weights<T, DQ>, a lane's part of 128 x 64 weights:
//   kScaleBytes                          of scales in a stage, a multiple of 16
//   Weights(args, first)                 of outputs first .. first + 127
//   fill(args, codes, scales, step)      the calling thread's copies into a stage
//   decode(args, table, codes, scales, step, w)  A operands of a stage
//   place(output)                        the row of D^T that has it
#pragma once

#include "linear_fragments.h"
#include "wgmma.h"

namespace halfbyte::cuda {

constexpr int kWgmmaThreads = 256;
constexpr int kCodeBytes = int(kWgmmaRows * kSmallChunk) / 2;  // of a stage
constexpr int kPairs = 256 * 16;                               // entries of the table
constexpr int kTurnedPitch = int(kWgmmaRows) + 4;              // keeps the lanes' 4 t x 8 g apart
static_assert(kWgmmaRows == kWgmmaThreads / 2 && kSwizzledRow == kSmallChunk * 2);

// Shared memory, from a multiple of 1024 bytes on: the ring's input, its codes, its scales, the table. Sums leave by the ring.
template <int Tokens, int ScaleBytes>
struct WgmmaShared {
  static constexpr int kSlots = Tokens <= 128 ? 8 : Tokens <= 192 ? 6 : 5;
  static constexpr int kInput = Tokens * int(kSwizzledRow);
  static constexpr int kCodesAt = kSlots * kInput, kScalesAt = kCodesAt + kSlots * kCodeBytes;
  static constexpr int kTableAt = kScalesAt + kSlots * ScaleBytes, kBytes = kTableAt + kPairs * 8 + 1024;
  static_assert(kInput % kSwizzledPattern == 0 && kBytes <= 227 * 1024 && Tokens * kTurnedPitch * 4 <= kTableAt);
};

// Rows of input and of packed are 16-byte aligned.
struct WgmmaArgs : ProductArgs {
  int reduction;  // a multiple of 8
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

// A thread's share of filling a stage with input: one 16-byte unit of every 32nd row. What does not exist becomes zeros.
template <class T, int Tokens>
struct InputFill {
  const T* input;
  int rows, unit, at;

  __device__ InputFill(const WgmmaArgs& a, int first_token, int tokens) {
    const int token = int(threadIdx.x) / 8;
    unit = int(threadIdx.x) % 8;
    rows = tokens - token;
    input = kept(static_cast<const T*>(a.input) + (first_token + (rows > 0 ? token : 0)) * int64_t(a.reduction) + unit * 8);
    at = token * int(kSwizzledRow) + (unit ^ (token % 8)) * 16;
  }
  __device__ void operator()(const WgmmaArgs& a, uint8_t* stage, int step) const {
    const bool within = step * int(kSmallChunk) + unit * 8 < a.reduction;
#pragma unroll
    for (int i = 0; i < Tokens / 32; ++i) {
      const bool exists = i * 32 < rows && within;
      copy_async(stage + at + i * 32 * int(kSwizzledRow),
                 exists ? input + i * 32 * int64_t(a.reduction) + step * kSmallChunk : input, exists);
    }
  }
};

template <template <class, bool> class WeightsOf, class T, bool DQ, int Tokens>
__device__ inline void multiply_packed(const WgmmaArgs& a) {
  using Weights = WeightsOf<T, DQ>;
  using S = WgmmaShared<Tokens, Weights::kScaleBytes>;
  uint8_t* shared = dynamic_shared<uint8_t>();
  shared += (0u - shared_address(shared)) % kSwizzledPattern;
  const int first_token = int(blockIdx.x) % a.token_tiles * a.tile_tokens;
  const int tokens = a.M - first_token < a.tile_tokens ? a.M - first_token : a.tile_tokens;
  const uint32_t first = blockIdx.x / uint32_t(a.token_tiles) * uint32_t(kWgmmaRows);
  const int begin = a.begin(), end = a.end();

  const InputFill<T, Tokens> fill_input(a, first_token, tokens);
  const Weights weights(a, first);
  const auto codes_of = [&](int slot) { return shared + S::kCodesAt + slot * kCodeBytes; };
  const auto scales_of = [&](int slot) { return shared + S::kScalesAt + slot * Weights::kScaleBytes; };
  // Step s into a slot, as one group of copies.
  const auto fill = [&](int slot, int s) {
    if (s < end) {
      fill_input(a, shared + slot * S::kInput, s);
      weights.fill(a, codes_of(slot), scales_of(slot), s);
    }
    copy_async_commit();
  };
#pragma unroll
  for (int s = 0; s < S::kSlots - 1; ++s) fill(s, begin + s);
  float2* const table = reinterpret_cast<float2*>(shared + S::kTableAt);
  fill_pair_table(a.codebook, table);
  const PairTable lookup(table, int(threadIdx.x) % 4);
  float sums[Tokens / 2] = {};
  uint32_t even[kChunkSteps][4] = {}, odd[kChunkSteps][4] = {};
  const uint64_t input = swizzled_descriptor(shared_address(shared));
  int slot = 0;  // of the step at hand
  const auto decode = [&](int s, uint32_t (&w)[kChunkSteps][4]) {
    weights.decode(a, lookup, codes_of(slot), scales_of(slot), s, w);
  };
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
    fill(before, s + S::kSlots - 1);
    decode(s + 1, next);
  };
  copy_async_wait<S::kSlots - 2>();
  fence_async_proxy();
  __syncthreads();
  if (begin < end) decode(begin, even);
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
  const int64_t column = int64_t(first) + r;
  if (column >= a.target.columns) return;
  for (int token = int(threadIdx.x) / int(kWgmmaRows); token < tokens; token += kWgmmaThreads / int(kWgmmaRows)) {
    leave_sum<T>(a, first_token + token, column, turned[token * kTurnedPitch + Weights::place(r)]);
  }
}

#endif

template <template <class, bool> class Weights, class T, bool DQ, int Tokens>
__global__ void __launch_bounds__(kWgmmaThreads, 1) wgmma_kernel(const WgmmaArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(HALFBYTE_EMULATE_CUDA)
  multiply_packed<Weights, T, DQ, Tokens>(a);
#else
  HALFBYTE_DEVICE_ASSERT(a.M < 0);  // linear_route.h sends nothing to this architecture
#endif
}

template <template <class, bool> class Weights, class T, bool DQ, int Tokens>
constexpr KernelChoice<WgmmaArgs> kWgmma{wgmma_kernel<Weights, T, DQ, Tokens>,
                                         WgmmaShared<Tokens, Weights<T, DQ>::kScaleBytes>::kBytes};

template <template <class, bool> class Weights, class T, bool DQ>
KernelChoice<WgmmaArgs> choose_wgmma(int tokens) {
  if (tokens <= 64) return kWgmma<Weights, T, DQ, 64>;
  if (tokens <= 128) return kWgmma<Weights, T, DQ, 128>;
  if (tokens <= 192) return kWgmma<Weights, T, DQ, 192>;
  return kWgmma<Weights, T, DQ, 256>;
}

template <template <class, bool> class Weights>
cudaError_t launch_wgmma(const PackedProduct& p, const ProductArgs& product, int64_t reduction, cudaStream_t stream) {
  const int64_t token_tiles = (p.M + kWgmmaTokens - 1) / kWgmmaTokens, tile_tokens = (p.M + token_tiles - 1) / token_tiles;
  const int64_t tiles = (product.target.columns + kWgmmaRows - 1) / kWgmmaRows * token_tiles;
  const WgmmaArgs args{product, int(reduction), int(token_tiles), int(tile_tokens)};
  const cudaError_t error = launch_splits(p, args, tiles, kWgmmaThreads, stream,
                                          [&]<class T, bool DQ>() { return choose_wgmma<Weights, T, DQ>(args.tile_tokens); });
  return error != cudaSuccess ? error : add_splits(p, args, stream);
}

}  // namespace halfbyte::cuda
