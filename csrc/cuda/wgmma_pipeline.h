// Products of packed weights by wgmma (compute capability 9.0): what linear_wgmma.cu and linear_backward_wgmma.cu share.
//
//   D^T = W X^T; a CTA: 128 outputs x up to 256 rows of input x a range of the reduction (one split)
//
// A group of two warpgroups has 64 outputs each and multiplies one step of 64 elements of the reduction. A CTA has one, or two that take
// steps in turn and add their sums at the end: decoding waits for its own results, and 4 warps a scheduler hide more of that than 2, if
// a thread can do with 128 registers (reloads of spilled ones wait behind copies, all the way to memory). Weights become the A operand
// in registers, all rows of input are B in shared memory. Every weight is read and decoded once a CTA, by the lane whose fragment it
// belongs to, and is then what dequantize gives: codebook value times scale in fp32, rounded once.
//
// Two rings are filled by `cp.async`: input, a step a group in a stage, in the swizzled layout of wgmma.h; and codes and scales, of
// which a stage holds Weights::kSteps steps: what a copy costs L1's data path is lines, however little of each it takes, and of a row
// of packed 4 steps are a line. Weights of the next step are decoded while wgmma multiplies this one; fragments of two steps are kept,
// so that a group of 4 wgmma is always running:
//
//   wgmma step s | wait for the one before | the next stage is there, the one before is free: fill it | decode the next | wgmma ...
//
// What differs is a class Weights<T, DQ, Groups>, a lane's part of 128 x 64 weights:
//   kGroups, kThreads                    of a CTA
//   kSteps, kScaleBytes                  of a stage: steps, 4 or one for each group; bytes of scales, a multiple of 16
//   Weights(args, first)                 of outputs first .. first + 127
//   fill(args, codes, scales, step, wanted)  the calling thread's copies, of kThreads, into the stage that begins with a step
//   decode(args, table, codes, scales, step, w)  A operands of a step of a stage
//   place(output)                        the row of D^T that has it
#pragma once

#include <utility>

#include "linear_fragments.h"
#include "wgmma.h"

namespace halfbyte::cuda {

constexpr int kGroupThreads = 256;
constexpr int kStepCodes = int(kWgmmaRows) * int(kSmallChunk) / 2;  // bytes
constexpr int kPairs = 256 * 16;                                    // entries of the table
constexpr int kTurnedPitch = int(kWgmmaRows) + 4;                   // keeps the lanes' 4 t x 8 g apart
static_assert(kWgmmaRows == kGroupThreads / 2 && kSwizzledRow == kSmallChunk * 2 && kWgmmaQuad == 4 * kSmallChunk);

// Shared memory, from a multiple of 1024 bytes on: input, in as many slots as there is room for, codes, scales, the table. Sums leave by
// the rings. When a stage of input is filled, kSlots - 1 ahead, the stage of codes that it may bring takes the place of one that has
// been read.
template <class Weights, int Tokens>
struct WgmmaShared {
  static constexpr int kInput = Tokens * int(kSwizzledRow);  // of a step
  static constexpr int code_slots(int slots) { return ((slots - 1) * Weights::kGroups + Weights::kSteps - 1) / Weights::kSteps + 1; }
  static constexpr int bytes(int slots) {
    const int stage = Weights::kSteps * kStepCodes + Weights::kScaleBytes;
    return slots * Weights::kGroups * kInput + code_slots(slots) * stage + kPairs * 8 + 1024;
  }
  static constexpr int most_slots() {
    int slots = 8;
    while (bytes(slots) > 227 * 1024) --slots;
    return slots;
  }
  static constexpr int kSlots = most_slots(), kCodeSlots = code_slots(kSlots), kBytes = bytes(kSlots);
  static constexpr int kCodesAt = kSlots * Weights::kGroups * kInput;
  static constexpr int kScalesAt = kCodesAt + kCodeSlots * Weights::kSteps * kStepCodes;
  static constexpr int kTableAt = kScalesAt + kCodeSlots * Weights::kScaleBytes;
  static_assert(kSlots >= 4 && kInput % kSwizzledPattern == 0 && Weights::kGroups * Tokens * kTurnedPitch * 4 <= kTableAt);
};

// Rows of input and of packed are 16-byte aligned. `steps` and `steps_per_split` count quads.
struct WgmmaArgs : ProductArgs {
  int reduction;  // a multiple of 8
  int token_tiles, tile_tokens;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(HALFBYTE_EMULATE_CUDA)

constexpr int kChunkSteps = int(kSmallChunk) / 16;  // wgmma a step

// table[byte][copy] = the values of the byte's two codes, the high nibble first. Called by all threads, which share out the copies.
template <int Groups>
__device__ inline void fill_pair_table(const Codebook16& book, float2* table) {
  const int byte = int(threadIdx.x) % kGroupThreads, group = int(threadIdx.x) / kGroupThreads;
  const float2 pair = make_float2(book.value[byte >> 4], book.value[byte & 15]);
#pragma unroll 4
  for (int j = group; j < 16; j += Groups) table[byte * 16 + ((j + byte) & 15)] = pair;
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

// A thread's share of filling a group's steps with input: one 16-byte unit of every 32nd row. What does not exist becomes zeros.
template <class T, int Tokens>
class InputFill {
 public:
  // From step `first` on.
  __device__ InputFill(const WgmmaArgs& a, int first_token, int tokens, int first) {
    const int thread = int(threadIdx.x) % kGroupThreads, token = thread / 8, unit = thread % 8;
    const int column = first * int(kSmallChunk) + unit * 8;
    rows_ = tokens - token;
    left_ = a.reduction - column;
    input_ = kept(static_cast<const T*>(a.input) + (rows_ > 0 ? first_token + token : 0) * int64_t(a.reduction) + column);
  }
  // The next step, if it is wanted; then `ahead` on.
  __device__ void operator()(const WgmmaArgs& a, uint8_t* stage, int ahead, bool wanted) {
    const int thread = int(threadIdx.x) % kGroupThreads, token = thread / 8, unit = thread % 8;
    uint8_t* const to = stage + token * int(kSwizzledRow) + (unit ^ (token % 8)) * 16;
    const T* from = input_;
#pragma unroll
    for (int i = 0; i < Tokens / 32; ++i, from += 32 * int64_t(a.reduction))  // an address that does not exist is not read
      copy_async(to + i * 32 * int(kSwizzledRow), from, i * 32 < rows_ && left_ > 0, wanted);
    input_ += ahead * kSmallChunk;
    left_ -= ahead * int(kSmallChunk);
  }

 private:
  const T* input_;
  int rows_, left_;
};

template <int Value>
using Constant = std::integral_constant<int, Value>;

template <class Weights, class T, int Tokens>
__device__ inline void multiply_packed(const WgmmaArgs& a) {
  constexpr int kGroups = Weights::kGroups, kThreads = Weights::kThreads, kParts = Weights::kSteps / kGroups;
  using S = WgmmaShared<Weights, Tokens>;
  uint8_t* shared = dynamic_shared<uint8_t>();
  shared += (0u - shared_address(shared)) % kSwizzledPattern;
  const int group = int(threadIdx.x) / kGroupThreads;
  const int first_token = int(blockIdx.x) % a.token_tiles * a.tile_tokens;
  const int tokens = a.M - first_token < a.tile_tokens ? a.M - first_token : a.tile_tokens;
  const uint32_t first = blockIdx.x / uint32_t(a.token_tiles) * uint32_t(kWgmmaRows);
  // Steps; where codes come 4 steps at a time the last quad is a whole one, of zeros past the reduction.
  const int begin = a.begin() * 4, all = (a.reduction + int(kSmallChunk) - 1) / int(kSmallChunk);
  const int whole = (all + Weights::kSteps - 1) / Weights::kSteps * Weights::kSteps, end = a.end() * 4 < whole ? a.end() * 4 : whole;

  InputFill<T, Tokens> fill_input(a, first_token, tokens, begin + group);
  const Weights weights(a, first);
  const auto codes_of = [&](int slot) { return shared + S::kCodesAt + slot * Weights::kSteps * kStepCodes; };
  const auto scales_of = [&](int slot) { return shared + S::kScalesAt + slot * Weights::kScaleBytes; };
  // The stage of input that begins with step s into a slot, and of codes if Part is 0, as one group of copies, of none past the end.
  int code_slot_filled = 0;
  const auto fill = [&]<int Part>(Constant<Part>, int slot, int s) {
    fill_input(a, shared + (slot * kGroups + group) * S::kInput, kGroups, s < end);
    if constexpr (Part == 0) {
      weights.fill(a, codes_of(code_slot_filled), scales_of(code_slot_filled), s, s < end);
      code_slot_filled = code_slot_filled + 1 == S::kCodeSlots ? 0 : code_slot_filled + 1;
    }
    copy_async_commit();
  };
  const auto fill_first = [&]<int... I>(std::integer_sequence<int, I...>) { (fill(Constant<I % kParts>(), I, begin + I * kGroups), ...); };
  fill_first(std::make_integer_sequence<int, S::kSlots - 1>());
  float2* const table = reinterpret_cast<float2*>(shared + S::kTableAt);
  fill_pair_table<kGroups>(a.codebook, table);
  const PairTable lookup(table, int(threadIdx.x) % 4);
  float sums[Tokens / 2] = {};
  uint32_t even[kChunkSteps][4] = {}, odd[kChunkSteps][4] = {};
  const uint64_t input = swizzled_descriptor(shared_address(shared + group * S::kInput));
  int slot = 0, code_slot = 0;  // of the stages at hand
  const auto decode = [&](int s, uint32_t (&w)[kChunkSteps][4]) {
    weights.decode(a, lookup, codes_of(code_slot), scales_of(code_slot), s, w);
  };
  // Multiplies the group's step of the stage that begins with step s, whose weights are `now`, and decodes that of the next into `next`.
  // Part: which of a stage of codes it is. Nothing here is a branch but the end (copies are predicated): ptxas would serialize wgmma.
  const auto step = [&]<int Part>(Constant<Part>, int s, uint32_t (&now)[kChunkSteps][4], uint32_t (&next)[kChunkSteps][4]) {
    wgmma_fence(sums, now);
#pragma unroll
    for (int c = 0; c < kChunkSteps; ++c)
      wgmma<T>(sums, now[c], input + uint64_t(uint32_t(slot * (kGroups * S::kInput >> 4))) + c * kDescriptorK16);
    wgmma_commit();
    wgmma_wait<1>(sums);  // the stage before is done: `next` is free
    const int before = slot == 0 ? S::kSlots - 1 : slot - 1;
    slot = slot + 1 == S::kSlots ? 0 : slot + 1;
    if (s + kGroups >= end) return;
    if constexpr (Part + 1 == kParts) code_slot = code_slot + 1 == S::kCodeSlots ? 0 : code_slot + 1;
    copy_async_wait<S::kSlots - 3>();
    fence_async_proxy();
    __syncthreads();  // the next stage has arrived, the one before has been read by everyone
    fill(Constant<(Part + S::kSlots - 1) % kParts>(), before, s + (S::kSlots - 1) * kGroups);
    decode(s + kGroups + group, next);
  };
  // kTurn stages, or fewer at the end.
  const auto turn = [&]<int... I>(std::integer_sequence<int, I...>, int s) {
    const auto one = [&]<int Stage>(Constant<Stage>) {
      if (Stage % kParts != 0 || s + Stage * kGroups < end)
        step(Constant<Stage % kParts>(), s + Stage * kGroups, Stage % 2 == 0 ? even : odd, Stage % 2 == 0 ? odd : even);
    };
    (one(Constant<I>()), ...);
  };
  copy_async_wait<S::kSlots - 2>();
  fence_async_proxy();
  __syncthreads();
  if (begin < end) decode(begin + group, even);
  constexpr int kTurn = kParts % 2 == 0 ? kParts : 2 * kParts;
  for (int s = begin; s < end; s += kTurn * kGroups) turn(std::make_integer_sequence<int, kTurn>(), s);
  wgmma_wait<0>(sums);
  copy_async_wait<0>();
  __syncthreads();  // the rings have been read by everyone
  float* const turned = reinterpret_cast<float*>(shared);  // (groups, Tokens, 128 rows)
  constexpr int kTurned = Tokens * kTurnedPitch;
  const int lane = int(threadIdx.x) % 32, row = int(threadIdx.x) % kGroupThreads / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < Tokens / 2; ++i)
    turned[group * kTurned + (i / 4 * 8 + lane % 4 * 2 + i % 2) * kTurnedPitch + row + i / 2 % 2 * 8] = sums[i];
  __syncthreads();
  const int r = int(threadIdx.x) % int(kWgmmaRows);
  const int64_t column = int64_t(first) + r;
  if (column >= a.target.columns) return;
  for (int token = int(threadIdx.x) / int(kWgmmaRows); token < tokens; token += kThreads / int(kWgmmaRows)) {
    const float* const of_group = turned + token * kTurnedPitch + Weights::place(r);
    leave_sum<T>(a, first_token + token, column, kGroups == 1 ? of_group[0] : add_rn(of_group[0], of_group[kTurned]));
  }
}

#endif

template <class Weights, class T, int Tokens>
__global__ void __launch_bounds__(Weights::kThreads, 1) wgmma_kernel(const WgmmaArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(HALFBYTE_EMULATE_CUDA)
  multiply_packed<Weights, T, Tokens>(a);
#else
  HALFBYTE_DEVICE_ASSERT(a.M < 0);  // linear_route.h sends nothing to this architecture
#endif
}

template <class Weights, class T, int Tokens>
constexpr KernelChoice<WgmmaArgs> kWgmma{wgmma_kernel<Weights, T, Tokens>, WgmmaShared<Weights, Tokens>::kBytes};

// TwoGroupsTokens: up to so many rows of input a CTA has two groups.
template <template <class, bool, int> class Weights, int TwoGroupsTokens>
cudaError_t launch_wgmma(const PackedProduct& p, const ProductArgs& product, int64_t reduction, cudaStream_t stream) {
  const int64_t token_tiles = (p.M + kWgmmaTokens - 1) / kWgmmaTokens, tile_tokens = (p.M + token_tiles - 1) / token_tiles;
  const int64_t tiles = (product.target.columns + kWgmmaRows - 1) / kWgmmaRows * token_tiles;
  const WgmmaArgs args{product, int(reduction), int(token_tiles), int(tile_tokens)};
  const auto choose = [&]<class T, bool DQ>() -> KernelChoice<WgmmaArgs> {
    const auto of = [&]<int Tokens>() { return kWgmma<Weights<T, DQ, (Tokens <= TwoGroupsTokens ? 2 : 1)>, T, Tokens>; };
    if (tile_tokens <= 64) return of.template operator()<64>();
    if (tile_tokens <= 128) return of.template operator()<128>();
    if (tile_tokens <= 192) return of.template operator()<192>();
    return of.template operator()<256>();
  };
  const int threads = tile_tokens <= TwoGroupsTokens ? 2 * kGroupThreads : kGroupThreads;
  const cudaError_t error = launch_splits(p, args, tiles, threads, stream, choose);
  return error != cudaSuccess ? error : add_splits(p, args, stream);
}

}  // namespace halfbyte::cuda
