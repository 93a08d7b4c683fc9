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

// Fetches those of the elements from `start` on.
inline void prefetch_scales(const uint8_t* row, const RowLayout& l, int64_t start) {
  prefetch(row + scales_at(l, start));
  if (is_double_quantized(l.format)) prefetch(row + l.scales_offset);  // step and low
}

// Which scales of their row up to kStretch elements have, from element `start` on, a multiple of 32 with whole blocks before it or inside
// one block. The same for all rows.
class BlockPlaces {
 public:
  BlockPlaces() = default;
  BlockPlaces(const RowLayout& l, int64_t start, int64_t count) {
    const int log2_block = __builtin_ctzll(uint64_t(l.block_size));  // shifts: a division costs as much as decoding 64 elements
    first_block = start >> log2_block;
    blocks = ((start + count + l.block_size - 1) >> log2_block) - first_block;
    shift_ = log2_block - 5;
    first_ = int32_t(start / 32 - (first_block << shift_));
  }

  int64_t first_block, blocks;
  // Of the 32 elements from `start` + 32 * step, among these blocks.
  int64_t index(int64_t step) const { return (first_ + step) >> shift_; }

 private:
  int32_t first_;  // 32-element steps from the start of the first block to `start`
  int32_t shift_;  // log2(block_size / 32)
};

// Decoded scales, for groups that are decoded between other work: a row's come at once.
struct BlockScales {
  using Places = BlockPlaces;
  static constexpr bool kWholeRow = false;
  static constexpr bool kInPlace = false;
  float value[kStretch / 32 + 4];  // 4 more, zero: vector loads may look past the last block

  void load(const uint8_t* row, const RowLayout& l, const BlockPlaces& places) {
    places_ = places;
    load_block_scales(row, l, places.first_block, places.blocks, value);
    for (int i = 0; i < 4; ++i) value[places.blocks + i] = 0.0f;
  }

  float at(int64_t step) const { return value[places_.index(step)]; }
  const float* from(int64_t step) const { return value + places_.index(step); }

 private:
  BlockPlaces places_;
};

// Scales where they lie, for groups that are decoded one after the other: a copy of a panel's few takes as long as such a group. Those of
// -dq are decoded. It may point into itself.
class ScalesInPlace {
 public:
  using Places = BlockPlaces;
  static constexpr bool kWholeRow = false;
  static constexpr bool kInPlace = true;  // nothing past those of a group may be read

  ScalesInPlace() = default;
  ScalesInPlace(const ScalesInPlace&) = delete;

  void load(const uint8_t* row, const RowLayout& l, const BlockPlaces& places) {
    places_ = places;
    if (is_double_quantized(l.format)) {
      load_block_scales(row, l, places.first_block, places.blocks, copied_);
      scales_ = reinterpret_cast<const uint8_t*>(copied_);
    } else {
      scales_ = row + l.scales_offset + 4 * places.first_block;
    }
  }

  // Of a last group that is not whole: a copy, with zeros for what it lacks. No branches; a loop would become a call of memcpy.
  void load_tail(const uint8_t* row, const RowLayout& l, const BlockPlaces& places) {
    load(row, l, places);
    uint32_t bits[4];
#pragma GCC unroll 4
    for (int64_t b = 0; b < 4; ++b) {
      memcpy(bits + b, scales_ + 4 * (b < places.blocks ? b : 0), 4);
      bits[b] &= -uint32_t(b < places.blocks);
    }
    memcpy(copied_, bits, sizeof bits);
    scales_ = reinterpret_cast<const uint8_t*>(copied_);
  }

  float at(int64_t step) const {
    float scale;
    memcpy(&scale, from(step), 4);
    return scale;
  }
  const uint8_t* from(int64_t step) const { return scales_ + 4 * places_.index(step); }

 private:
  BlockPlaces places_;
  const uint8_t* scales_;  // floats, unaligned
  float copied_[kStretch / 32];
};

// The one scale of a row of 8-bit codes.
struct RowScale {
  struct Places {
    Places() = default;
    Places(const RowLayout&, int64_t, int64_t) {}
  };
  static constexpr bool kWholeRow = true;
  static constexpr bool kInPlace = false;
  float value;

  void load(const uint8_t* row, const RowLayout& l, const Places& = {}) {
    memcpy(&value, row + l.scales_offset, 4);
    value = value / (l.format == kFP8 ? kFP8Max : kInt8Max);
  }
};

// Scales of rows that take turns, of a row's part of a panel, and of the forward's direct products, for which a decoder may name others.
template <class Copied, class Panel = Copied>
struct ScaleTypes {
  using Scales = Copied;
  using PanelScales = Panel;
  using DirectScales = Copied;
};
template <Codes codes>
struct ScalesOf : ScaleTypes<BlockScales, ScalesInPlace> {};
template <>
struct ScalesOf<Codes::kInt8> : ScaleTypes<RowScale> {};
template <>
struct ScalesOf<Codes::kFP8> : ScaleTypes<RowScale> {};

}  // namespace
}  // namespace halfbyte::cpu
