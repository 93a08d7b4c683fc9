// The 8-bit optimizer step of one block: decode the moments, update them and the parameter in fp32, encode the moments.
// One kernel for every ISA on the vectors of optimizer_simd_<isa>.h; only IEEE operations, so all ISAs agree bit for bit.
#pragma once

#if defined(__AVX512F__)
#include "optimizer_simd_avx512.h"
#elif defined(__AVX2__)
#include "optimizer_simd_avx2.h"
#else
#include "optimizer_simd_scalar.h"
#endif

#include "optimizer_codec.h"
#include "optimizer_rounding.h"
#include "optimizer_short_rows.h"

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

// Fetches the group of parameters and gradients that is kAhead elements behind this one. Each is a stream of its own, and all end with
// a page: the CPU's prefetcher starts anew there, later than a step whose work is as long as its reads can wait for. Always inline: GCC
// drops calls of a function that does nothing but prefetch.
template <class P, class G>
[[gnu::always_inline]] inline void fetch_group(const P* param, const G* grad) {
  constexpr int64_t kAhead = 1024;
#pragma GCC unroll 4
  for (int64_t i = 0; i < kGroup; i += 64 / int64_t(sizeof(P))) __builtin_prefetch(param + kAhead + i, 1);
#pragma GCC unroll 4
  for (int64_t i = 0; i < kGroup; i += 64 / int64_t(sizeof(G))) __builtin_prefetch(grad + kAhead + i);
}

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

inline Ints magnitude_bits(Floats a) { return bit_and(bits(a), splat_bits(0x7FFFFFFFu)); }

// The largest |moment| of each lane, as bits: NaN counts as the largest of all, and so does a negative second moment.
struct LaneMaxima {
  Ints first = splat_bits(0), second = splat_bits(0);

  // Of two vectors' first moments. Beside a second moment larger_magnitude will do, which may pass over NaN: where a first moment is NaN,
  // the gradient was not finite, and the second one is not, or the block's scale was not, and none of its first moments is.
  template <OptimizerRule RULE>
  [[gnu::always_inline]] void add_first(Floats low, Floats high) {
    if constexpr (has_second_moment(RULE)) first = maximum_unsigned(first, bits(larger_magnitude(low, high)));
    else first = maximum_unsigned(maximum_unsigned(first, magnitude_bits(low)), magnitude_bits(high));
  }
};

// What a vector's new moments leave for its parameter: rules with two moments have the root and the division before them.
struct Updated {
  Floats first, second;  // the moments; second: of rules with two
  Floats param;          // the new parameter of rules with one
};

// One vector's new moments, also written to first[0..kWidth) and second[0..kWidth). The codes are those of code_floats; rules with one
// moment ignore the second. Of the maxima it adds to the second's. Inlined by order, or the block's factors would be loaded again for each
// vector.
template <OptimizerRule RULE>
[[gnu::always_inline]] inline Updated update_moments(Floats param, Floats grad, Floats first_code, Floats second_code,
                                                     const BlockFactors& f, float* first, float* second, LaneMaxima& most) {
  grad = mul(grad, f.grad_factor);
  const Floats stored = decode_signed(first_code);
  if constexpr (RULE == OptimizerRule::kAdam || RULE == OptimizerRule::kSGD) {
    if (f.has_weight_decay) grad = fma(f.weight_decay, param, grad);
  }
  const Floats moment = fma(stored, f.first_keep, mul(grad, f.first_take));
  store(first, moment);
  if constexpr (has_second_moment(RULE)) {
    const Floats square = fma(decode_unsigned(second_code), f.second_keep, mul(mul(grad, grad), f.second_take));
    store(second, square);
    most.second = maximum_unsigned(most.second, bits(square));  // a negative one is above kInfBits
    return {moment, square, param};
  } else if constexpr (RULE == OptimizerRule::kLion) {
    const Floats mixed = fma(stored, f.second_keep, mul(grad, f.second_take));
    const Floats one = from_bits(bit_xor(bits(splat(1.0f)), bit_and(bits(mixed), splat_bits(0x80000000u))));
    // 0 * mixed makes the update NaN where the gradient is not finite: a sign alone would hide it.
    const Floats sign = fma(mixed, splat(0.0f), keep_if_nonzero(one, mixed));
    return {moment, moment, fma(f.minus_step, sign, mul(param, f.decay))};
  } else {
    return {moment, moment, fma(f.minus_step, f.nesterov ? fma(f.momentum, moment, grad) : moment, param)};
  }
}

// The new parameter.
template <OptimizerRule RULE>
[[gnu::always_inline]] inline Floats apply_moments(Floats param, const Updated& u, const BlockFactors& f) {
  if constexpr (has_second_moment(RULE)) {
    const Floats update = divide(u.first, fma(square_root(u.second), f.second_factor, f.eps));
    return fma(f.minus_step, update, RULE == OptimizerRule::kAdamW ? mul(param, f.decay) : param);
  } else {
    return u.param;
  }
}

// Where new parameters go: rounded to the nearest at once, or kept until all are there (stochastic rounding).
template <class P>
class NewParameters {
 public:
  NewParameters(P* param, bool stochastic) : param_(param), stochastic_(stochastic) {}

  [[gnu::always_inline]] void put(int64_t i, Floats x) {
    if (keep()) store(kept_ + i, x);
    else store_as(param_ + i, x);
  }
  [[gnu::always_inline]] void put_pair(int64_t i, Floats low, Floats high) {
    if (keep()) {
      store(kept_ + i, low);
      store(kept_ + i + kWidth, high);
    } else {
      store_pair_as(param_ + i, low, high);
    }
  }
  [[gnu::always_inline]] void put_first(int64_t i, Floats x, int64_t count) {
    if (keep()) store(kept_ + i, x);
    else store_first(param_ + i, x, count);
  }
  // Of `count` elements, the first of which is element `index` of the optimizer.
  void round(int64_t count, const OptimizerScalars& s, uint64_t index) const {
    if (keep()) round_stochastic(kept_, count, index, s.seed, s.step, param_);
  }

 private:
  alignas(64) float kept_[sizeof(P) == 2 ? kStateBlock : 1];
  P* param_;
  bool stochastic_;

  bool keep() const { return sizeof(P) == 2 && stochastic_; }  // fp32 has nothing to round
};

// Where the root and the division come after the moments of the whole block, while they are encoded: beside them, in one chain of 75
// cycles, they hold up what decodes and encodes (Zen 3). With AVX-512 they come after the moments of the next pair of vectors, which is
// far enough: while encoding Zen 4 loses 3 % by them.
template <OptimizerRule RULE>
constexpr bool kLate = has_second_moment(RULE) && kWidth == 8;

// New parameters of the pair of vectors from j on, whose two moments are in first and second.
template <OptimizerRule RULE, class P>
[[gnu::always_inline]] inline void put_later(const P* param, const float* first, const float* second, int64_t j, const BlockFactors& f,
                                             NewParameters<P>& fresh) {
  const int64_t k = j + kWidth;
  Floats low, high;
  load_pair_as(param + j, low, high);
  low = apply_moments<RULE>(low, {load(first + j), load(second + j), low}, f);
  high = apply_moments<RULE>(high, {load(first + k), load(second + k), high}, f);
  fresh.put_pair(j, low, high);
}

// Of a group of 4 vectors from `at` on.
template <OptimizerRule RULE, class P>
[[gnu::always_inline]] inline void put_late(const P* param, const float* first, const float* second, int64_t at, const BlockFactors& f,
                                            NewParameters<P>& fresh) {
  put_later<RULE>(param, first, second, at, f, fresh);
  put_later<RULE>(param, first, second, at + 2 * kWidth, f, fresh);
}

// Updates `count` elements; `index`: global index of the first one. Inlined by order: a call for each block would load the tables,
// the constants and the scalars again, 3 cycles for 16 elements (Zen 4).
template <OptimizerRule RULE, class P, class G>
[[gnu::always_inline]] inline void update_block(const OptimizerBlock<P, G> block, int64_t count, float* first_scale,
                                                float* second_scale, const OptimizerScalars& s, uint64_t index) {
  constexpr bool kTwo = has_second_moment(RULE);
  alignas(64) float first[kStateBlock], second[kTwo ? kStateBlock : kWidth];
  NewParameters<P> fresh(block.param, s.stochastic);
  // Lion interpolates the same moment twice, with two weights.
  const BlockFactors f(s, *first_scale, kTwo ? *second_scale : *first_scale);
  LaneMaxima lanes;
  int64_t i = 0;
  const auto update = [&](int64_t j, Floats param, Floats grad, Floats first_code, Floats second_code) __attribute__((always_inline)) {
    return update_moments<RULE>(param, grad, first_code, second_code, f, first + j, kTwo ? second + j : second, lanes);
  };
  const uint8_t* const second_codes = kTwo ? block.second_codes : block.first_codes;
  for (; i + kGroup <= count; i += kGroup) {
    const CodeGroup of_first = load_code_group(block.first_codes + i), of_second = load_code_group(second_codes + i);
    fetch_group(block.param + i, block.grad + i);
#pragma GCC unroll 2
    for (int v = 0; v < 4; v += 2) {
      const int64_t j = i + v * kWidth, k = j + kWidth;
      Floats low_param, high_param, low_grad, high_grad;
      load_pair_as(block.param + j, low_param, high_param);
      load_pair_as(block.grad + j, low_grad, high_grad);
      const Updated low = update(j, low_param, low_grad, code_floats(of_first, v), code_floats(of_second, v));
      const Updated high = update(k, high_param, high_grad, code_floats(of_first, v + 1), code_floats(of_second, v + 1));
      lanes.add_first<RULE>(low.first, high.first);
      if constexpr (!kTwo) fresh.put_pair(j, low.param, high.param);
      else if (!kLate<RULE> && j > 0) put_later<RULE>(block.param, first, second, j - 2 * kWidth, f, fresh);
    }
  }
  const int64_t grouped = i;
  if constexpr (kTwo && !kLate<RULE>) {
    if (grouped > 0) put_later<RULE>(block.param, first, second, grouped - 2 * kWidth, f, fresh);
  }
  for (; i + kWidth <= count; i += kWidth) {
    const Floats param = load_as(block.param + i);
    const Updated u = update(i, param, load_as(block.grad + i), code_floats(block.first_codes + i), code_floats(second_codes + i));
    lanes.add_first<RULE>(u.first, u.first);
    fresh.put(i, apply_moments<RULE>(param, u, f));
  }
  if (i < count) {
    const int64_t n = count - i;  // fewer than a vector: zeros behind them
    const Floats param = load_first(block.param + i, n);
    const Updated u = update(i, param, load_first(block.grad + i, n), code_floats_of_first(block.first_codes + i, n, 127),
                             code_floats_of_first(second_codes + i, n, 0));
    lanes.add_first<RULE>(u.first, u.first);
    fresh.put_first(i, apply_moments<RULE>(param, u, f), n);
  }
  MomentMaxima most{largest(lanes.first), largest(lanes.second)};
  if constexpr (kLate<RULE>) {
    if (count == kStateBlock && is_plain(most.first) && is_plain(most.second)) [[likely]] {
      *first_scale = bits_float(most.first);
      *second_scale = bits_float(most.second);
      const OneFactor first_factor{splat(1.0f / *first_scale)}, second_factor{splat(1.0f / *second_scale)};
      for (int64_t at = 0; at < kStateBlock; at += kGroup) {
        put_late<RULE>(block.param, first, second, at, f, fresh);
        encode_vectors<true, 4>(first + at, first_factor, block.first_codes + at);
        encode_vectors<false, 4>(second + at, second_factor, block.second_codes + at);
      }
      return fresh.round(count, s, index);
    }
    for (int64_t at = 0; at < grouped; at += kGroup) put_late<RULE>(block.param, first, second, at, f, fresh);
  }
  fresh.round(count, s, index);
  if (most.first >= kInfBits || most.second >= kInfBits) [[unlikely]] most = restart_unusual(first, kTwo ? second : nullptr, count);
  encode_block<true>(first, count, most.first, block.first_codes, first_scale);
  if constexpr (kTwo) encode_block<false>(second, count, most.second, block.second_codes, second_scale);
}

// Short rows, one block each, as the matrices of LoRA have them: 4 vectors at a time, so that the work of several rows overlaps.
// Alone, a row of 16 waits for its maximum, its reciprocal and its codes one after the other: 58 ns with AVX-512, here 27.
// Takes whole groups of rows [begin, end); returns the first row left. Bits as update_block's.
template <OptimizerRule RULE, class P, class G, class Rows>
int64_t update_short_rows(const OptimizerTensor& t, const OptimizerScalars& s, int64_t begin, int64_t end) {
  constexpr bool kTwo = has_second_moment(RULE);
  const Rows group(t.row_length);
  const int64_t rows = kGroup / group.length();
  BlockFactors f(s, 0.0f, 0.0f);
  for (; begin + rows <= end; begin += rows) {
    alignas(64) float first[kGroup], second[kTwo ? kGroup : 1];
    const int64_t start = begin * group.length();
    const OptimizerBlock<P, G> block{static_cast<P*>(t.param) + start, static_cast<const G*>(t.grad) + start, t.codes[0] + start,
                                     kTwo ? t.codes[1] + start : nullptr};
    fetch_group(block.param, block.grad);
    NewParameters<P> fresh(block.param, s.stochastic);
    float* const first_scales = t.scales[0] + begin;
    float* const second_scales = kTwo ? t.scales[1] + begin : nullptr;
    const CodeGroup first_codes = load_code_group(block.first_codes);
    const CodeGroup second_codes = load_code_group(kTwo ? block.second_codes : block.first_codes);
    Ints first_most[4], second_most[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int i = j * kWidth;
      // Lion interpolates the same moment twice, with two weights.
      f.first_keep = mul(group.spread(first_scales, j), splat(s.first_keep));
      f.second_keep = mul(group.spread(kTwo ? second_scales : first_scales, j), splat(s.second_keep));
      LaneMaxima lanes;
      const Updated u = update_moments<RULE>(load_as(block.param + i), load_as(block.grad + i), code_floats(first_codes, j),
                                             code_floats(second_codes, j), f, first + i, kTwo ? second + i : second, lanes);
      first_most[j] = magnitude_bits(u.first);
      second_most[j] = lanes.second;
      if (!kLate<RULE>) fresh.put(i, apply_moments<RULE>(load_as(block.param + i), u, f));
    }
    typename Rows::Scales first_found, second_found;
    first_found.find(group, first_most);
    if constexpr (kTwo) second_found.find(group, second_most);
    if constexpr (kLate<RULE>) put_late<RULE>(block.param, first, second, 0, f, fresh);
    fresh.round(kGroup, s, t.element_offset + uint64_t(start));
    if (first_found.plain && second_found.plain) [[likely]] {
      first_found.store_to(first_scales);
      encode_vectors<true, 4>(first, first_found.factor, block.first_codes);
      if constexpr (kTwo) {
        second_found.store_to(second_scales);
        encode_vectors<false, 4>(second, second_found.factor, block.second_codes);
      }
    } else {
      encode_unusual_rows(first, kTwo ? second : nullptr, rows, group.length(), block.first_codes, first_scales, block.second_codes,
                          second_scales);
    }
  }
  return begin;
}

template <OptimizerRule RULE, class P, class G>
void update_blocks(const OptimizerTensor& t, const OptimizerScalars& s, int64_t begin, int64_t end) {
  if (t.row_length == 2 * kWidth) begin = update_short_rows<RULE, P, G, VectorRows<2>>(t, s, begin, end);
  if (t.row_length == kWidth) begin = update_short_rows<RULE, P, G, VectorRows<1>>(t, s, begin, end);
  if (t.row_length < kWidth && (t.row_length & (t.row_length - 1)) == 0)
    begin = update_short_rows<RULE, P, G, LaneRows>(t, s, begin, end);
  int64_t row = begin / t.blocks_per_row, in_row = begin % t.blocks_per_row;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t column = in_row * kStateBlock;
    const int64_t start = row * t.row_length + column;
    const int64_t count = t.row_length - column < kStateBlock ? t.row_length - column : kStateBlock;
    update_block<RULE, P, G>({static_cast<P*>(t.param) + start, static_cast<const G*>(t.grad) + start, t.codes[0] + start,
                              t.codes[1] ? t.codes[1] + start : nullptr},
                             count, t.scales[0] + b, t.scales[1] ? t.scales[1] + b : nullptr, s,
                             t.element_offset + uint64_t(start));
    if (++in_row == t.blocks_per_row) in_row = 0, ++row;
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
