// int8_linear: integer products of quantized activations and packed int8 rows, scaled in the epilogue. Included once per ISA,
// after linear_tiled.h (whose products it runs on integers) and one of int8_linear_{scalar,words,vnni}.h.
//
// y = round(float(sum) * (token factor * row factor) + bias), every operation rounded to fp32: the same bits everywhere.
#pragma once

#include "int8_linear_kernels.h"
#include "linear_tiled.h"

namespace halfbyte::cpu {
namespace {

inline float int8_factor(const uint8_t* row, const RowLayout& l) {
  float absmax;
  memcpy(&absmax, row + l.scales_offset, 4);
  return absmax / kInt8Max;
}

// `offset` is what storing one side as code + 128 has added to `sum`; both may have wrapped, their difference has not.
inline float int8_result(int32_t sum, uint32_t offset, float token_factor, float row_factor) {
  return float(int32_t(uint32_t(sum) - offset)) * (token_factor * row_factor);
}
// The same of a row's sums with kLanes tokens.
inline Vector int8_results(Int8Units::Sum sums, uint32_t offset, Vector token_factors, float row_factor) {
  using Sum = Int8Units::Sum;
  typedef uint32_t Wrapping __attribute__((vector_size(sizeof(Sum))));
  return __builtin_convertvector(Sum(Wrapping(sums) - offset), Vector) * (token_factors * row_factor);
}

// ---- direct: dot products along K, R rows at a time -------------------------------------------------------------------

void int8_prepare_direct(const uint8_t* rows, int64_t tokens, const RowLayout& l, void* codes, int32_t* sums, float* factors) {
  const int64_t K = l.in_features, padded = round_up(K, Int8Dot::kStep);
  auto* out = static_cast<Int8Dot::Code*>(codes);
  for (int64_t m = 0; m < tokens; ++m, rows += l.row_bytes, out += padded) {
    int32_t sum = 0;
    for (int64_t k = 0; k < K; ++k) {
      const int8_t code = int8_t(rows[k]);
      out[k] = code;
      sum += code;
    }
    memset(out + K, 0, size_t(padded - K) * sizeof *out);
    sums[m] = sum;
    factors[m] = int8_factor(rows, l);
  }
}

// What several passes over the same rows fetch to L2 meanwhile: as many rows behind them, each pass its part, so that memory waits for
// none.
template <int R>
class NextBlock {
 public:
  NextBlock(const uint8_t* packed, int64_t row, int64_t row_begin, int64_t row_end, const RowLayout& l, const Pass& pass)
      : next_(packed + (row_end * pass.count + pass.index * (row_end - row_begin) + row - row_begin) * l.row_bytes / pass.count),
        end_(next_) {
    const int64_t steps = pass.count * (l.in_features / Int8Dot::kStep);
    share_ = steps == 0 ? 0 : (R * l.row_bytes + steps - 1) / steps;
  }
  // As NextRows': in every step.
  [[gnu::always_inline]] void fetch(const uint8_t*) {
    for (end_ += share_; next_ < end_; next_ += 64) prefetch_l2(next_);
  }

 private:
  const uint8_t *next_, *end_;
  int64_t share_;
};

template <int R, int M, class Next>
inline void int8_direct_rows(const uint8_t* packed, int64_t row, const RowLayout& l, Next next, const Int8Dot::Code* x,
                             const int32_t* x_sums, const float* factors, const LinearOutput& output) {
  const int64_t K = l.in_features, padded = round_up(K, Int8Dot::kStep), whole = K / Int8Dot::kStep * Int8Dot::kStep;
  const uint8_t* base = packed + row * l.row_bytes;
  Int8Dot::Sum sum[M][R];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum[m][r] = Int8Dot::zero();
  const auto step = [&](int r, const uint8_t* codes, int64_t k) {
    const Int8Dot::Values w = Int8Dot::weights(codes);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) sum[m][r] = Int8Dot::multiply_add(w, x + m * padded + k, sum[m][r]);
  };
  for (int64_t k = 0; k < whole; k += Int8Dot::kStep) {
    next.fetch(base + k);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) step(r, base + r * l.row_bytes + k, k);
  }
  if (whole < K) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      uint8_t tail[Int8Dot::kStep] = {};  // a load past the codes could leave the tensor
      memcpy(tail, base + r * l.row_bytes + whole, size_t(K - whole));
      step(r, tail, whole);
    }
  }
  float row_factors[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) row_factors[r] = int8_factor(base + r * l.row_bytes, l);
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    int32_t totals[R];
    float result[R];
    if constexpr (R == 4) Int8Dot::totals(sum[m], totals);
    else totals[0] = Int8Dot::total(sum[m][0]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      result[r] = int8_result(totals[r], Int8Dot::kWeightOffset * uint32_t(x_sums[m]), factors[m], row_factors[r]);
    store_output<Int8Units>(output, m, row, result, R);
  }
}

template <int M>
void int8_direct_tokens(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& l, const void* codes,
                        const int32_t* sums, const float* factors, const Pass& pass, const LinearOutput& output) {
  const auto* x = static_cast<const Int8Dot::Code*>(codes);
  int64_t row = row_begin;
  const auto rows = [&]<int R>() {
    for (; row + R <= row_end; row += R) {
      const auto multiply = [&](auto next) { int8_direct_rows<R, M>(packed, row, l, next, x, sums, factors, output); };
      if (pass.count == 1)
        multiply(NextRows<R, (R * Int8Dot::kStep + 63) / 64>(packed + row * l.row_bytes, l.row_bytes, R * Int8Dot::kStep,
                                                             M * l.in_features * int64_t(sizeof *x)));
      else multiply(NextBlock<R>(packed, row, row_begin, row_end, l, pass));
    }
  };
  rows.template operator()<4>();
  rows.template operator()<1>();
}

void int8_direct(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& l, const void* codes,
                 const int32_t* sums, const float* factors, int64_t tokens, const Pass& pass, const LinearOutput& output) {
  with_count<kPassTokens>(
      tokens, [&]<int M>() { int8_direct_tokens<M>(packed, row_begin, row_end, l, codes, sums, factors, pass, output); });
}

// ---- tiled: linear's micro-kernel, weights broadcast unit by unit, tokens in vectors ----------------------------------

inline int64_t int8_units(const RowLayout& l) {
  constexpr int kElements = Int8Units::kUnitElements;
  return round_up((l.in_features + kElements - 1) / kElements, kUnitMultiple<Int8Units>);
}

void int8_prepare_tiled(const uint8_t* rows, int64_t first, int64_t tokens, const RowLayout& l, void* units, float* factors) {
  constexpr int64_t kElements = Int8Units::kUnitElements;
  const int64_t all = int8_units(l), given = tokens - first < kLanes ? tokens - first : kLanes;
  const int64_t m0 = kOnTiles<Int8Units> ? first : first / kTileTokens * kTileTokens;
  const int64_t width = tile_vectors<Int8Units>(tokens - m0) * kLanes;
  for (int64_t m = 0; m < given; ++m) factors[first + m] = int8_factor(rows + m * l.row_bytes, l);
  for (int64_t u = 0; u < all; u += kLanes) {
    float* out = static_cast<float*>(units) + unit_at<Int8Units>(all, tokens, m0, width, u) + first - m0;
    // What is past the last code is whatever lies there: it meets zero weights.
    turn_rows(
        [&](int m) __attribute__((always_inline)) {
          return m < given ? Int8Units::activations(rows + m * l.row_bytes + u * kElements) : zero_vector();
        },
        [&](int i, Vector unit) __attribute__((always_inline)) {
          if (u + i < all) store_values(out + i * width, unit);
        });
  }
}

// Rows of codes for walk_panels.
class CodeRows {
  using L = Layout<Int8Units>;
  static constexpr int64_t kElements = Int8Units::kUnitElements;

 public:
  static constexpr int64_t kLineUnits = 64 / kElements;

  CodeRows(const RowLayout& layout, const float* token_factors, const LinearOutput& output)
      : l(layout), token_factors(token_factors), output(output) {}

  static int64_t codes_at(int64_t unit) { return unit * kElements; }

  void begin(const uint8_t* rows, int64_t count) {
    for (int64_t r = 0; r < count; ++r) {
      offset[r] = 0;
      factors[r] = int8_factor(rows + r * l.row_bytes, l);
    }
  }

  struct Part {
    int64_t unit, count, coded;  // units, and how many of them have a code
  };

  Part part(int64_t unit, int64_t count) const {
    const int64_t left = (l.in_features + kElements - 1) / kElements - unit;
    return {unit, count, count < left ? count : left};
  }

  void decode(int64_t r, const uint8_t* row, const Part& part, float* out, const uint8_t* next, int64_t next_unit) {
    // Up to 3 bytes past the codes are read: the zeros between codes and scale.
    offset[r] += uint32_t(Int8Units::weights<L::kVectorStep>(row + codes_at(part.unit), part.coded, out));
    if (L::kFetchDecoding) {  // with the line that they end in: rows are no whole lines
      for (int64_t i = 0; i < part.count * kElements; i += 64) prefetch(next + codes_at(next_unit) + i);
      prefetch(next + codes_at(next_unit) + part.count * kElements - 1);
    }
  }

  void finish(int64_t n0, int64_t rows, int64_t first, int64_t count, const L::Sums& sums) const {
    for (int64_t m0 = 0; m0 < count; m0 += kLanes) {
      float of_tokens[kLanes] = {};  // sums of tokens past the end are whatever the padded tile gave
      memcpy(of_tokens, token_factors + first + m0, size_t(m0 + kLanes < count ? kLanes : count - m0) * sizeof(float));
      const Vector factors_of_tokens = Float32::load(of_tokens);
      for (int64_t r = 0; r < rows; ++r) {
        float* const at = sums.at(r, m0);
        store_values(at, int8_results(Int8Units::load_sums(at), offset[r], factors_of_tokens, factors[r]));
      }
    }
    store_turned<Int8Units>(sums, first, count, n0, rows, output);
  }

 private:
  const RowLayout& l;
  const float* const token_factors;
  const LinearOutput& output;
  uint32_t offset[L::kMany.rows];
  float factors[L::kMany.rows];
};

void int8_tiled(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& l, const void* units,
                const float* factors, int64_t tokens, const LinearOutput& output, void* scratch) {
  CodeRows rows(l, factors, output);
  walk_panels<Int8Units>(packed, row_begin, row_end, l.row_bytes, units, tokens, int8_units(l), scratch, rows);
}

// Three or four passes over rows that are in L2 take less than a vector of tokens that has to be turned, and one of them less than a vector
// more. On tiles 16 tokens take little longer than 4.
constexpr int32_t kInt8DirectTokens = kOnTiles<Int8Units> ? kPassTokens : kLanes == 16 ? 16 : kLanes == 8 ? 12 : kPassTokens;
constexpr int32_t kInt8RestTokens = kOnTiles<Int8Units> ? 0 : kPassTokens;
static_assert(kInt8DirectTokens <= kMostDirectTokens && kInt8RestTokens <= kMostDirectTokens);

constexpr Int8LinearKernels int8_linear_kernels() {
  Int8LinearKernels k{};
  k.unit_elements = Int8Units::kUnitElements;
  k.block_rows = Layout<Int8Units>::kBlockRows;
  k.unit_multiple = kUnitMultiple<Int8Units>;
  k.direct_step = Int8Dot::kStep;
  k.direct_bytes = sizeof(Int8Dot::Code);
  k.direct_tokens = kInt8DirectTokens;
  k.rest_tokens = kInt8RestTokens;
  k.panel_rows = Layout<Int8Units>::kMany.rows;
  k.decoding_tokens = kOnTiles<Int8Units> ? 128 : kDecodingTokens;
  k.sharing_rows = kOnTiles<Int8Units> ? 350 : kSharingRows;
  k.prepare_direct = int8_prepare_direct;
  k.direct = int8_direct;
  k.prepare_tiled = int8_prepare_tiled;
  k.tiled = int8_tiled;
  return k;
}

}  // namespace
}  // namespace halfbyte::cpu
