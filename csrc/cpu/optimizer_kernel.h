// The 8-bit optimizer step of one block: decode the moments, update them and the parameter in fp32, encode the moments.
// One kernel for every ISA on the vectors of optimizer_simd_<isa>.h; only IEEE operations, so all ISAs agree bit for bit.
#pragma once

#if defined(__AVX512BF16__)
#include "optimizer_simd_avx512.h"
#elif defined(__AVX2__)
#include "optimizer_simd_avx2.h"
#else
#include "optimizer_simd_scalar.h"
#endif

#include "optimizer_codec.h"
#include "optimizer_rounding.h"

namespace halfbyte::cpu::optimizer {
namespace {

// Pointers to the first element of a block (or of one vector of it).
template <class P, class G>
struct OptimizerBlock {
  P* param;
  const G* grad;
  uint8_t* first_codes;
  uint8_t* second_codes;
};

// What a block's elements are multiplied with: OptimizerScalars and the block's scales, spread over vectors.
struct BlockFactors {
  Floats grad_factor, first_keep, first_take, second_keep, second_take, second_factor, eps;
  Floats minus_step, decay, weight_decay, momentum;
  bool has_weight_decay, nesterov;

  BlockFactors(const OptimizerScalars& s, float first_scale, float second_scale)
      : grad_factor(splat(s.grad_factor)),
        first_keep(splat(first_scale * s.first_keep)),
        first_take(splat(s.first_take)),
        second_keep(splat(second_scale * s.second_keep)),
        second_take(splat(s.second_take)),
        second_factor(splat(s.second_factor)),
        eps(splat(s.eps)),
        minus_step(splat(-s.step_size)),
        decay(splat(s.decay)),
        weight_decay(splat(s.weight_decay)),
        momentum(splat(s.momentum)),
        has_weight_decay(s.weight_decay != 0.0f),
        nesterov(s.nesterov) {}
};

constexpr bool has_second_moment(OptimizerRule rule) {
  return rule == OptimizerRule::kAdamW || rule == OptimizerRule::kAdam;
}

// The largest |moment| of each lane, as bits.
struct LaneMaxima {
  Ints first = splat_bits(0), second = splat_bits(0);
};

// One vector: returns the new parameter, writes the new moments to first[0..kWidth) and second[0..kWidth). Inlined by order, or
// the block's factors would be loaded again for each vector.
template <OptimizerRule RULE, class P, class G>
[[gnu::always_inline]] inline Floats update_vector(const OptimizerBlock<P, G>& at, const BlockFactors& f, float* first, float* second,
                            LaneMaxima& most) {
  const Floats param = load_as(at.param);
  Floats grad = mul(load_as(at.grad), f.grad_factor);
  const Floats stored = decode_signed(at.first_codes);
  if constexpr (RULE == OptimizerRule::kAdam || RULE == OptimizerRule::kSGD) {
    if (f.has_weight_decay) grad = fma(f.weight_decay, param, grad);
  }
  const Floats moment = fma(stored, f.first_keep, mul(grad, f.first_take));
  store(first, moment);
  most.first = maximum_unsigned(most.first, bit_and(bits(moment), splat_bits(0x7FFFFFFFu)));
  if constexpr (has_second_moment(RULE)) {
    const Floats square = fma(decode_unsigned(at.second_codes), f.second_keep, mul(mul(grad, grad), f.second_take));
    store(second, square);
    most.second = maximum_unsigned(most.second, bits(square));  // a negative one is above kInfBits
    const Floats update = divide(moment, fma(square_root(square), f.second_factor, f.eps));
    return fma(f.minus_step, update, RULE == OptimizerRule::kAdamW ? mul(param, f.decay) : param);
  } else if constexpr (RULE == OptimizerRule::kLion) {
    const Floats mixed = fma(stored, f.second_keep, mul(grad, f.second_take));
    const Floats one = from_bits(bit_xor(bits(splat(1.0f)), bit_and(bits(mixed), splat_bits(0x80000000u))));
    // 0 * mixed makes the update NaN where the gradient is not finite: a sign alone would hide it.
    const Floats sign = fma(mixed, splat(0.0f), keep_if_nonzero(one, mixed));
    return fma(f.minus_step, sign, mul(param, f.decay));
  } else {
    return fma(f.minus_step, f.nesterov ? fma(f.momentum, moment, grad) : moment, param);
  }
}

// The last elements of a block, fewer than a vector: on padded copies, zero where there is no element.
template <OptimizerRule RULE, class P, class G>
inline Floats update_tail(const OptimizerBlock<P, G>& at, int64_t count, const BlockFactors& f, float* first, float* second,
                          LaneMaxima& most) {
  P param[kWidth] = {};
  G grad[kWidth] = {};
  uint8_t first_codes[kWidth], second_codes[kWidth] = {};
  memset(first_codes, 127, kWidth);
  memcpy(param, at.param, size_t(count) * sizeof(P));
  memcpy(grad, at.grad, size_t(count) * sizeof(G));
  memcpy(first_codes, at.first_codes, size_t(count));
  if (has_second_moment(RULE)) memcpy(second_codes, at.second_codes, size_t(count));
  return update_vector<RULE, P, G>({param, grad, first_codes, second_codes}, f, first, second, most);
}

// A whole block whose moments are updated but not encoded yet.
template <bool TWO>
struct Waiting {
  alignas(64) float first[kStateBlock], second[TWO ? kStateBlock : 1];
  OneFactor first_factor, second_factor;
  uint8_t *first_codes = nullptr, *second_codes = nullptr;  // null: nothing waits

  [[gnu::always_inline]] void encode(int64_t i) {
    encode_group<true, 4>(first + i, first_factor, first_codes + i);
    if constexpr (TWO) encode_group<false, 4>(second + i, second_factor, second_codes + i);
  }
};

// Where one block is updated while the one before is encoded: the update waits for square roots and divisions, and encoding for
// the block's maximum and its reciprocal, which take as long as four vectors' instructions. On a core of Zen 4 this saves AdamW 8 %
// and SGD 18 %. With 16 registers what both need is loaded again and again: AVX2 lost by it (bf16 1.6 %, SGD 6 %).
constexpr bool kOverlap = kWidth == 16;

// Updates `count` elements; `index`: global index of the first one. With kOverlap encodes what waits in `previous`, and leaves a
// whole block in `next`.
template <OptimizerRule RULE, class P, class G>
void update_block(const OptimizerBlock<P, G> block, int64_t count, float* first_scale, float* second_scale,
                  const OptimizerScalars& s, uint64_t index, Waiting<has_second_moment(RULE)>& previous,
                  Waiting<has_second_moment(RULE)>& next) {
  constexpr bool kTwo = has_second_moment(RULE);
  alignas(64) float fresh[kStateBlock];
  // Lion interpolates the same moment twice, with two weights.
  const BlockFactors f(s, *first_scale, kTwo ? *second_scale : *first_scale);
  const bool stochastic = s.stochastic && sizeof(P) == 2;
  LaneMaxima lanes;
  int64_t i = 0;
  const auto update = [&](int64_t j) __attribute__((always_inline)) {
    const OptimizerBlock<P, G> at{block.param + j, block.grad + j, block.first_codes + j, kTwo ? block.second_codes + j : nullptr};
    return update_vector<RULE, P, G>(at, f, next.first + j, kTwo ? next.second + j : next.second, lanes);
  };
  const auto update_pair = [&](int64_t j) __attribute__((always_inline)) {
    const Floats low = update(j), high = update(j + kWidth);
    if (stochastic) {
      store(fresh + j, low);
      store(fresh + j + kWidth, high);
    } else {
      store_pair_as(block.param + j, low, high);
    }
  };
  int64_t encoded = kOverlap && previous.first_codes ? 0 : kStateBlock;
  for (; kOverlap && i + kGroup <= count; i += kGroup) {
    update_pair(i);
    update_pair(i + 2 * kWidth);
    if (kOverlap && encoded < kStateBlock) previous.encode(encoded), encoded += kGroup;
  }
  for (; kOverlap && encoded < kStateBlock; encoded += kGroup) previous.encode(encoded);
  previous.first_codes = nullptr;
  for (; i + 2 * kWidth <= count; i += 2 * kWidth) update_pair(i);
  if (i + kWidth <= count) {
    const Floats param = update(i);
    if (stochastic) store(fresh + i, param);
    else store_as(block.param + i, param);
    i += kWidth;
  }
  if (i < count) {
    const OptimizerBlock<P, G> at{block.param + i, block.grad + i, block.first_codes + i, kTwo ? block.second_codes + i : nullptr};
    const Floats param =
        update_tail<RULE, P, G>(at, count - i, f, next.first + i, kTwo ? next.second + i : next.second, lanes);
    store(fresh + i, param);
    if (!stochastic) {
      P rounded[kWidth];
      store_as(rounded, param);
      memcpy(at.param, rounded, size_t(count - i) * sizeof(P));
    }
  }
  if (stochastic) round_stochastic(fresh, count, index, s.seed, s.step, block.param);
  MomentMaxima most{largest(lanes.first), largest(lanes.second)};
  if (most.first >= kInfBits || most.second >= kInfBits) [[unlikely]]
    most = restart_unusual(next.first, kTwo ? next.second : nullptr, count);
  if (kOverlap && count == kStateBlock && is_plain(most.first) && (!kTwo || is_plain(most.second))) {
    *first_scale = bits_float(most.first);
    next.first_factor = {splat(1.0f / *first_scale)};
    next.first_codes = block.first_codes;
    if constexpr (kTwo) {
      *second_scale = bits_float(most.second);
      next.second_factor = {splat(1.0f / *second_scale)};
      next.second_codes = block.second_codes;
    }
    return;
  }
  encode_block<true>(next.first, count, most.first, block.first_codes, first_scale);
  if constexpr (kTwo) encode_block<false>(next.second, count, most.second, block.second_codes, second_scale);
}

// Rows of V vectors, one block each, as the matrices of LoRA have them: 4 vectors at a time, so that the work of several rows
// overlaps. Alone, a row of 16 waits for its maximum, its reciprocal and its codes one after the other: 58 ns, here 27.
// Takes whole groups of rows [begin, end); returns the first row left. Bits as update_block's.
template <OptimizerRule RULE, class P, class G, int V>
int64_t update_narrow(const OptimizerTensor& t, const OptimizerScalars& s, int64_t begin, int64_t end) {
  constexpr bool kTwo = has_second_moment(RULE);
  constexpr int kRows = 4 / V;
  const bool stochastic = s.stochastic && sizeof(P) == 2;
  BlockFactors f(s, 0.0f, 0.0f);
  for (; begin + kRows <= end; begin += kRows) {
    alignas(64) float first[kGroup], second[kTwo ? kGroup : 1], fresh[kGroup];
    const int64_t start = begin * t.row_length;
    const OptimizerBlock<P, G> block{static_cast<P*>(t.param) + start, static_cast<const G*>(t.grad) + start, t.codes[0] + start,
                                     kTwo ? t.codes[1] + start : nullptr};
    float* const first_scale = t.scales[0] + begin;
    float* const second_scale = kTwo ? t.scales[1] + begin : first_scale;
    LaneMaxima lanes[kRows];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int r = j / V, i = j * kWidth;
      f.first_keep = splat(first_scale[r] * s.first_keep);
      f.second_keep = splat(second_scale[r] * s.second_keep);
      const OptimizerBlock<P, G> at{block.param + i, block.grad + i, block.first_codes + i, kTwo ? block.second_codes + i : nullptr};
      const Floats param = update_vector<RULE, P, G>(at, f, first + i, kTwo ? second + i : second, lanes[r]);
      if (stochastic) store(fresh + i, param);
      else store_as(at.param, param);
    }
    if (stochastic) round_stochastic(fresh, kGroup, t.element_offset + uint64_t(start), s.seed, s.step, block.param);
    uint32_t first_bits[kRows], second_bits[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      first_bits[r] = largest(lanes[r].first);
      second_bits[r] = largest(lanes[r].second);
      if (first_bits[r] >= kInfBits || second_bits[r] >= kInfBits) [[unlikely]] {
        const int at = r * V * kWidth;
        const MomentMaxima most = restart_unusual(first + at, kTwo ? second + at : nullptr, V * kWidth);
        first_bits[r] = most.first;
        second_bits[r] = most.second;
      }
    }
    encode_rows<true, V>(first, first_bits, block.first_codes, first_scale);
    if constexpr (kTwo) encode_rows<false, V>(second, second_bits, block.second_codes, second_scale);
  }
  return begin;
}

template <OptimizerRule RULE, class P, class G>
void update_blocks(const OptimizerTensor& t, const OptimizerScalars& s, int64_t begin, int64_t end) {
  if (t.row_length == kWidth) begin = update_narrow<RULE, P, G, 1>(t, s, begin, end);
  if (t.row_length == 2 * kWidth) begin = update_narrow<RULE, P, G, 2>(t, s, begin, end);
  int64_t row = begin / t.blocks_per_row, in_row = begin % t.blocks_per_row;
  Waiting<has_second_moment(RULE)> waiting[2];
  for (int64_t b = begin; b < end; ++b) {
    const int64_t column = in_row * kStateBlock;
    const int64_t start = row * t.row_length + column;
    const int64_t count = t.row_length - column < kStateBlock ? t.row_length - column : kStateBlock;
    update_block<RULE, P, G>({static_cast<P*>(t.param) + start, static_cast<const G*>(t.grad) + start, t.codes[0] + start,
                              t.codes[1] ? t.codes[1] + start : nullptr},
                             count, t.scales[0] + b, t.scales[1] ? t.scales[1] + b : nullptr, s,
                             t.element_offset + uint64_t(start), waiting[b & 1], waiting[~b & 1]);
    if (++in_row == t.blocks_per_row) in_row = 0, ++row;
  }
  for (auto& last : waiting) {
    for (int64_t i = 0; kOverlap && last.first_codes && i < kStateBlock; i += kGroup) last.encode(i);
  }
}

template <OptimizerRule RULE, class P>
void update_of(const OptimizerTensor& t, const OptimizerScalars& s, int64_t begin, int64_t end) {
  switch (t.grad_dtype) {
    case DType::kFloat32: return update_blocks<RULE, P, float>(t, s, begin, end);
    case DType::kBFloat16: return update_blocks<RULE, P, BFloat16>(t, s, begin, end);
    case DType::kFloat16: return update_blocks<RULE, P, Float16>(t, s, begin, end);
  }
}

template <OptimizerRule RULE>
void update_rule(const OptimizerTensor& t, const OptimizerScalars& s, int64_t begin, int64_t end) {
  switch (t.param_dtype) {
    case DType::kFloat32: return update_of<RULE, float>(t, s, begin, end);
    case DType::kBFloat16: return update_of<RULE, BFloat16>(t, s, begin, end);
    case DType::kFloat16: return update_of<RULE, Float16>(t, s, begin, end);
  }
}

void update(OptimizerRule rule, const OptimizerTensor& t, const OptimizerScalars& s, int64_t begin, int64_t end) {
  switch (rule) {
    case OptimizerRule::kAdamW: return update_rule<OptimizerRule::kAdamW>(t, s, begin, end);
    case OptimizerRule::kAdam: return update_rule<OptimizerRule::kAdam>(t, s, begin, end);
    case OptimizerRule::kLion: return update_rule<OptimizerRule::kLion>(t, s, begin, end);
    case OptimizerRule::kSGD: return update_rule<OptimizerRule::kSGD>(t, s, begin, end);
  }
}

OptimizerKernels kernels() { return {update}; }

}  // namespace
}  // namespace halfbyte::cpu::optimizer
