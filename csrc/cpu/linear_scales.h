// Scales of a stretch of a packed row, ready for the decoders of linear_decode_*.h. Included once per ISA.
#pragma once

#include "block_scales.h"
#include "linear_kernels.h"

namespace halfbyte::cpu {
namespace {

// What the decoders distinguish. kFourBit32 is kFourBit with blocks of 32, which some decoders treat apart.
enum class Codes { kFourBit, kFourBit32, kInt8, kFP8 };

constexpr bool four_bit(Codes codes) { return codes == Codes::kFourBit || codes == Codes::kFourBit32; }

// K is walked in stretches of this many elements (a multiple of every block size), so that scales fit a small buffer.
constexpr int64_t kStretch = 4096;

// Where in a packed row the scales of element `start` lie.
inline int64_t scales_at(const RowLayout& l, int64_t start) {
  if (!is_4bit(l.format)) return l.scales_offset;
  const int64_t block = start >> __builtin_ctzll(uint64_t(l.block_size));
  return is_double_quantized(l.format) ? l.code_bytes + block : l.scales_offset + 4 * block;
}

// Decoded scales of up to kStretch elements from element `start`, a multiple of 32 with whole blocks before it or inside
// one block.
struct BlockScales {
  static constexpr bool kWholeRow = false;  // load() says of which elements
  float value[kStretch / 32 + 4];  // 4 more, zero: vector loads may look past the last block
  int32_t first;                   // 32-element steps from the start of value[0]'s block to `start`
  int32_t shift;                   // log2(block_size / 32)

  void load(const uint8_t* row, const RowLayout& l, int64_t start, int64_t count) {
    const int log2_block = __builtin_ctzll(uint64_t(l.block_size));  // shifts: a division costs as much as decoding 64 elements
    shift = log2_block - 5;
    const int64_t block = start >> log2_block;
    const int64_t blocks = ((start + count + l.block_size - 1) >> log2_block) - block;
    first = int32_t(start / 32 - (block << shift));
    load_block_scales(row, l, block, blocks, value);
    for (int i = 0; i < 4; ++i) value[blocks + i] = 0.0f;
  }

  // Scale of the 32 elements from `start` + 32 * step.
  float at(int64_t step) const { return value[(first + step) >> shift]; }
  const float* from(int64_t step) const { return value + ((first + step) >> shift); }
};

// The one scale of a row of 8-bit codes.
struct RowScale {
  static constexpr bool kWholeRow = true;
  float value;

  void load(const uint8_t* row, const RowLayout& l, int64_t, int64_t) {
    memcpy(&value, row + l.scales_offset, 4);
    value = value / (l.format == kFP8 ? kFP8Max : kInt8Max);
  }
};

template <Codes codes>
struct ScalesOf {
  using Type = BlockScales;
};
template <>
struct ScalesOf<Codes::kInt8> {
  using Type = RowScale;
};
template <>
struct ScalesOf<Codes::kFP8> {
  using Type = RowScale;
};

}  // namespace
}  // namespace halfbyte::cpu
