// error_feedback: quantization of rows one column after another, each column's error carried into the columns to come
// (GPTQ, arXiv:2210.17323). A vector lane is a row, so nothing is added across lanes and every instruction set, tile and
// thread count gives the same bits. Scratch is w[K][rows of a tile], then the errors of one panel.
#pragma once

#include "error_feedback.h"
#include "optimizer_kernel.h"  // Floats and their operations
#include "quantize_kernel.h"

namespace halfbyte::cpu {
namespace {

namespace feedback {

using namespace optimizer;

constexpr int kVectors = 2;  // of rows in a tile: two chains of dependent steps overlap
constexpr int kTile = kVectors * kWidth;
// Columns updated at once: kVectors * kColumns accumulators and kVectors errors fit the registers.
constexpr int kColumns = kWidth == 16 ? 12 : 4;

inline Floats subtract(Floats a, Floats b) { return fma(splat(-1.0f), b, a); }  // exact product: one rounding

inline Floats with_sign_of(Floats magnitude, Floats v) {
  return from_bits(bit_xor(bits(magnitude), bit_and(bits(v), splat_bits(0x80000000u))));
}

// The value of the code that normalized v gets: of the codebook, or an integer, or an e4m3 number.
template <int32_t Format>
inline Floats code_value(Floats v) {
  const Floats magnitude = from_bits(bit_and(bits(v), splat_bits(0x7FFFFFFFu)));
  if (Format == kNF4) {
    Floats value = splat(kNF4Codebook[0]);
#pragma GCC unroll 15
    for (int i = 0; i < 15; ++i) value = if_greater(v, splat(kNF4Thresholds.value[i]), splat(kNF4Codebook[i + 1]), value);
    return value;
  }
  if (Format == kFP4) {
    Floats value = splat(0.0f);
#pragma GCC unroll 7
    for (int i = 0; i < 7; ++i)
      value = if_greater(magnitude, splat(kFP4Thresholds.value[i]), splat(kFP4Codebook[kFP4Ascending[i + 1]]), value);
    return with_sign_of(value, v);
  }
  if (Format == kInt8) {
    // 1.5 * 2^23 has its last bit worth 1.
    const Floats clamped = maximum(minimum(v, splat(kInt8Max)), splat(-kInt8Max)), round = splat(12582912.0f);
    return subtract(add(clamped, round), round);
  }
  // A power of two whose last bit is worth the code's last bit: 2^-9 for subnormal codes.
  const Floats clamped = minimum(magnitude, splat(kFP8Max));
  const Floats exponent = from_bits(bit_and(bits(clamped), splat_bits(0x7F800000u)));
  const Floats round = maximum(mul(exponent, splat(0x1p20f)), splat(0x1p14f));
  return with_sign_of(subtract(add(clamped, round), round), v);
}

template <int32_t Format>
constexpr float limit_of() {
  return Format == kInt8 ? kInt8Max : kFP8Max;
}

// One element by the rules, for any scale; 0 where the scale is not positive and finite.
template <int32_t Format>
inline float any_value(float x, float scale) {
  if (!(scale > 0.0f) || !is_finite(scale)) return 0.0f;
  const float reciprocal = 1.0f / scale;
  if (Format == kNF4 || Format == kFP4) {
    const float v = is_finite(reciprocal) ? x * reciprocal : x / scale;
    return (Format == kNF4 ? kNF4Codebook[encode_nf4(v)] : kFP4Codebook[encode_fp4(v)]) * scale;
  }
  constexpr float kLimit = limit_of<Format>();
  const float factor = reciprocal * kLimit;
  const float v = is_finite(factor) ? x * factor : (x / scale) * kLimit;
  return (Format == kInt8 ? float(int8_t(float_to_int8(v))) : fp8_to_float(float_to_fp8(v))) * (scale / kLimit);
}

// Rounds elements of the rows of one vector under their scales.
template <int32_t Format>
struct Rounder {
  Floats scale, multiplier, unit;
  bool plain;  // every lane takes the usual path

  explicit Rounder(Floats s) : scale(s) {
    multiplier = divide(splat(1.0f), s);
    unit = s;
    if (Format == kInt8 || Format == kFP8) {
      multiplier = mul(multiplier, splat(limit_of<Format>()));
      unit = divide(s, splat(limit_of<Format>()));
    }
    plain = largest(bits(multiplier)) < 0x7F800000u && !any_below(bits(multiplier), 1);
  }

  Floats operator()(Floats x) const {
    if (plain) [[likely]] return mul(code_value<Format>(mul(x, multiplier)), unit);
    return lane_by_lane(x);
  }

 private:
  [[gnu::noinline]] Floats lane_by_lane(Floats x) const {
    float element[kWidth], scales[kWidth];
    store(element, x);
    store(scales, scale);
    for (int i = 0; i < kWidth; ++i) element[i] = any_value<Format>(element[i], scales[i]);
    return load(element);
  }
};

// Scales of one block for the rows of one vector: the first candidate with the least weighted squared error.
// w: the block's first element, kTile floats from column to column.
template <int32_t Format>
[[gnu::noinline]] Floats search_scale(const FeedbackArgs& a, const float* w, const float* importance, int64_t count) {
  Floats absmax = splat(0.0f);
  for (int64_t k = 0; k < count; ++k)
    absmax = maximum(from_bits(bit_and(bits(load(w + k * kTile)), splat_bits(0x7FFFFFFFu))), absmax);
  Floats best = absmax, least = splat(INFINITY);
  for (int64_t c = 0; c < a.num_candidates; ++c) {
    const Rounder<Format> round(mul(absmax, splat(a.candidates[c])));
    Floats error = splat(0.0f);
    for (int64_t k = 0; k < count; ++k) {
      const Floats x = load(w + k * kTile), off = subtract(x, round(x));
      error = fma(mul(off, off), splat(importance[k]), error);
    }
    best = if_greater(least, error, round.scale, best);
    least = if_greater(least, error, error, least);
  }
  return best;
}

// w[k] += errors[j] * factor[j][k] for columns k of [begin, end), j ascending.
template <int Columns>
inline void carry_columns(const float* errors, const float* factor, int64_t stride, int64_t count, float* w) {
  Floats sum[Columns][kVectors];
#pragma GCC unroll 12
  for (int c = 0; c < Columns; ++c)
    for (int v = 0; v < kVectors; ++v) sum[c][v] = load(w + c * kTile + v * kWidth);
  for (int64_t j = 0; j < count; ++j, factor += stride, errors += kTile) {
    const Floats e0 = load(errors), e1 = load(errors + kWidth);
#pragma GCC unroll 12
    for (int c = 0; c < Columns; ++c) {
      const Floats u = splat(factor[c]);
      sum[c][0] = fma(e0, u, sum[c][0]);
      sum[c][1] = fma(e1, u, sum[c][1]);
    }
  }
#pragma GCC unroll 12
  for (int c = 0; c < Columns; ++c)
    for (int v = 0; v < kVectors; ++v) store(w + c * kTile + v * kWidth, sum[c][v]);
}

// Columns [begin, end) of one block: rounds them and carries their errors into the rest of the row.
template <int32_t Format>
inline void round_panel(const FeedbackArgs& a, int64_t K, int64_t begin, int64_t end, const Rounder<Format> (&round)[kVectors],
                        float* w, float* errors) {
  for (int64_t j = begin; j < end; ++j) {
    const float* row = a.factor + j * K;
    float* error = errors + (j - begin) * kTile;
    for (int v = 0; v < kVectors; ++v) {
      const Floats x = load(w + j * kTile + v * kWidth);
      store(error + v * kWidth, divide(subtract(round[v](x), x), splat(row[j])));
    }
    const Floats e0 = load(error), e1 = load(error + kWidth);
    for (int64_t k = j + 1; k < end; ++k) {
      float* target = w + k * kTile;
      store(target, fma(e0, splat(row[k]), load(target)));
      store(target + kWidth, fma(e1, splat(row[k]), load(target + kWidth)));
    }
  }
  int64_t k = end;
  const float* factor = a.factor + begin * K;
  for (; k + kColumns <= K; k += kColumns) carry_columns<kColumns>(errors, factor + k, K, end - begin, w + k * kTile);
  for (; k < K; ++k) carry_columns<1>(errors, factor + k, K, end - begin, w + k * kTile);
}

inline int64_t block_count(const RowLayout& l, int64_t block) {
  const int64_t left = l.in_features - block * l.block_size;
  return left < l.block_size ? left : l.block_size;
}

template <int32_t Format>
[[gnu::noinline]] void run_tile(const FeedbackArgs& a, const RowLayout& l, int64_t first, int64_t rows, float* w) {
  const int64_t K = l.in_features;
  float* errors = w + K * kTile;
  for (int64_t k = 0; k < K; ++k)  // rows that do not exist are zero
    for (int r = 0; r < kTile; ++r) w[k * kTile + r] = r < rows ? a.weight[(first + r) * K + k] : 0.0f;
  for (int64_t b = 0; b < l.num_blocks; ++b) {
    const int64_t begin = b * l.block_size, count = block_count(l, b);
    float scales[kTile];
    for (int r = 0; r < kTile; ++r) scales[r] = a.scales && r < rows ? a.scales[(first + r) * l.num_blocks + b] : 0.0f;
    for (int v = 0; v < kVectors && !a.scales; ++v)
      store(scales + v * kWidth, search_scale<Format>(a, w + begin * kTile + v * kWidth, a.importance + begin, count));
    for (int64_t r = 0; r < rows; ++r) a.chosen[(first + r) * l.num_blocks + b] = scales[r];
    if (!a.factor) continue;
    const Rounder<Format> round[kVectors] = {Rounder<Format>(load(scales)), Rounder<Format>(load(scales + kWidth))};
    for (int64_t j = begin; j < begin + count; j += kFeedbackPanel) {
      const int64_t end = j + kFeedbackPanel < begin + count ? j + kFeedbackPanel : begin + count;
      round_panel<Format>(a, K, j, end, round, w, errors);
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < K; ++k) a.targets[(first + r) * K + k] = w[k * kTile + r];
}

template <int32_t Format>
void run_rows(const FeedbackArgs& a, const RowLayout& l, int64_t begin, int64_t end, float* scratch) {
  for (int64_t r = begin; r < end; r += kTile) run_tile<Format>(a, l, r, end - r < kTile ? end - r : kTile, scratch);
}

void run(const FeedbackArgs& a, const RowLayout& l, int64_t begin, int64_t end, float* scratch) {
  const IEEEFloats mode;
  switch (l.format) {
    case kNF4:
    case kNF4DQ: run_rows<kNF4>(a, l, begin, end, scratch); break;
    case kFP4:
    case kFP4DQ: run_rows<kFP4>(a, l, begin, end, scratch); break;
    case kInt8: run_rows<kInt8>(a, l, begin, end, scratch); break;
    default: run_rows<kFP8>(a, l, begin, end, scratch); break;
  }
}

int64_t scratch_floats(int64_t in_features) { return (in_features + kFeedbackPanel) * kTile; }

inline FeedbackKernels kernels() { return {kTile, scratch_floats, run}; }

}  // namespace feedback
}  // namespace
}  // namespace halfbyte::cpu
