// What the forward fronts of linear and lora_linear share: prepare the activations once, split the output over threads.
//
// bf16 inputs multiply in bf16 pairs where the CPU has them and they pay (weights rounded to bf16, as in a dense bf16 layer), a few
// of them 4-bit codes as int16 with AVX2 (errors an eighth of that); everything else, fp16 and bf16 on older CPUs included, multiplies
// exact fp32 weights. Sums are fp32, in an order that depends neither on the number of threads nor on how the work is split.
#pragma once

#include <cstring>

#include "columns_driver.h"

namespace halfbyte::cpu {

inline Compute forward_compute(DType dtype, int64_t tokens, int32_t format, const LinearKernels& table) {
  if (dtype == DType::kBFloat16 && is_4bit(format) && tokens <= table.in(Compute::kInt16).direct_tokens) return Compute::kInt16;
  return tokens <= table.exact_tokens ? Compute::kFloat32 : compute_for(dtype, table);
}

// The low-rank part of a forward product. weight (N, rank) holds one block per group of rows: rows of group g multiply
// columns [g * rank, (g + 1) * rank) of input (M, groups * rank).
struct LowRankOperands {
  const Tensor& weight;  // contiguous, of one of the three dtypes
  const Tensor& input;   // likewise
  const std::vector<int64_t>& groups;  // rows of each; adds up to N
  float factor;
};

// `low`'s weight in units, block by block: (N + kMostTileRows, units of all groups), zeros outside the blocks.
inline Tensor low_rank_weight(const LowRankOperands& low, Compute compute, int64_t stride) {
  const LinearKernels& table = kernels().linear;
  const int64_t N = low.weight.size(0), rank = low.weight.size(1);
  Tensor units = unit_buffer(low.weight, (N + kMostTileRows) * stride * elements_per_unit(compute), compute);
  torch::stable::zero_(units);
  char* out = static_cast<char*>(units.mutable_data_ptr());
  int64_t first = 0;
  for (size_t g = 0; g < low.groups.size(); first += low.groups[g++])
    table.prepare_low_rank(at_row(low.weight, first, rank), checked_dtype("lora_linear", "lora_B", low.weight.scalar_type()),
                           low.groups[g], rank, 1.0f, compute, int64_t(g) * rank, stride, out + first * stride * 4);
  return units;
}

// output = x @ packed^T + bias (of `target`) + the low-rank part. x (tokens, K) of dtype, contiguous.
struct Forward : ProductSizes {
  const Tensor& x;
  const uint8_t* packed;
  const LowRankOperands* low;
  LinearOutput target;
};

// The low-rank part as the kernels take it, if there is one: its weight in units, and memory for the input of `tokens` tokens.
struct LowRankUnits {
  int64_t rank = 0, stride = 0;
  DType dtype{};
  std::optional<Tensor> weight, input;

  // Rows of a multiple of so many units.
  LowRankUnits(const Forward& f, int64_t tokens, int64_t multiple) {
    if (!f.low) return;
    const int64_t elements = elements_per_unit(f.compute);
    rank = f.low->input.size(f.low->input.dim() - 1);
    stride = round_up((rank + elements - 1) / elements, multiple);
    dtype = checked_dtype("lora_linear", "projected", f.low->input.scalar_type());
    weight = low_rank_weight(*f.low, f.compute, stride);
    input = unit_buffer(f.x, tokens * stride * elements, f.compute);
  }
  // The input of all tokens, token after token.
  void prepare(const Forward& f) const {
    if (!f.low) return;
    std::memset(input_at(0), 0, size_t(f.tokens * stride * 4));
    kernels().linear.prepare_low_rank(f.low->input.const_data_ptr(), dtype, f.tokens, rank, f.low->factor, f.compute, 0, stride,
                                      input_at(0));
  }
  void* input_at(int64_t token) const { return static_cast<char*>(input->mutable_data_ptr()) + token * stride * 4; }
  // Of tokens from `token` on.
  std::optional<LowRank> addend(int64_t token) const {
    if (!weight) return std::nullopt;
    return LowRank{weight->const_data_ptr(), input_at(token), true, rank, stride};
  }
};

// Few tokens, each row decoded in registers.
inline void forward_direct(const Forward& f) {
  const LinearKernels& table = kernels().linear;
  const int64_t K = f.layout.in_features, token_bytes = f.token_bytes();
  const CallScratch scratch(f.x, f.tokens * token_bytes);
  char* const units = static_cast<char*>(scratch.data());
  const LowRankUnits low(f, f.tokens, table.lanes);
  for (int64_t m = 0; m < f.tokens; m += kPassTokens)
    table.prepare_direct(at_row(f.x, m, K), f.dtype, std::min(f.tokens - m, kPassTokens), f.layout, f.compute, units + m * token_bytes);
  low.prepare(f);
  parallel_rows(f.rows, row_grain(K * f.tokens), [&](int64_t begin, int64_t end) {
    by_passes(f.tokens, begin, end, 16, [&](int64_t m, int64_t tokens, int64_t row, int64_t row_end) {
      const auto addend = low.addend(m);
      table.direct(f.packed, row, row_end, f.layout, f.compute, units + m * token_bytes, tokens, address(addend), f.target.from(m, 0));
    });
  });
}

inline TiledProduct tiled_product(const ProductSizes& f) {
  const LinearKernels& table = kernels().linear;
  const LinearArithmetic& arithmetic = table.in(f.compute);
  const int64_t K = f.layout.in_features, token_bytes = f.token_bytes();
  const TokenBlocks blocks = tiled_blocks(f.tokens, f.rows, arithmetic.block_rows, token_bytes, table.scratch_bytes,
                                          arithmetic.decoding_tokens, arithmetic.sharing_rows);
  return {f.tokens, f.rows, K, token_bytes, table.tile_tokens, K * table.tile_tokens, arithmetic.block_rows,
          table.scratch_bytes, blocks};
}

// More tokens, rows decoded into panels.
inline void forward_tiled(const Forward& f) {
  const LinearKernels& table = kernels().linear;
  const int64_t K = f.layout.in_features;
  const TiledProduct p = tiled_product(f);
  const LowRankUnits low(f, p.blocks.threads * p.width(), table.lanes);
  const auto prepare = [&](const TokenBlock& b, int64_t begin, int64_t end, void* units, void*) {
    table.prepare_tiled(at_row(f.x, b.first, K), f.dtype, b.count, f.layout, f.compute, begin, end, units);
    if (f.low && begin == 0)
      table.prepare_low_rank_tiled(at_row(f.low->input, b.first, low.rank), low.dtype, b.count, low.rank, f.low->factor, f.compute,
                                   low.input_at(b.thread * p.width()));
  };
  run_tiled(p, f.x, prepare, [&](const TokenBlock& b, int64_t begin, int64_t end, const void* units, void* scratch) {
    const auto addend = low.addend(b.thread * p.width());
    table.tiled(f.packed, begin, end, f.layout, f.compute, units, b.count, address(addend), f.target.from(b.first, 0), scratch);
  });
}

inline ColumnsProduct turned_product(const ProductSizes& f, const Tensor* x) {
  const LinearKernels& table = kernels().linear;
  const int64_t K = f.layout.in_features, run = table.in(f.compute).turned_rows;
  return columns_product(TokenMatrix(x, f.dtype, f.tokens, K, f.compute), std::nullopt, parts_of(f.rows, run), f.rows, K * run,
                         [&](int64_t tokens) { return table.turned_scratch(f.compute, tokens, f.rows, K); });
}

// Many tokens, or some of a layer with few rows: weights are turned.
inline void forward_turned(const Forward& f) {
  const LinearKernels& table = kernels().linear;
  const int64_t run = table.in(f.compute).turned_rows;
  const ColumnsProduct p = turned_product(f, &f.x);
  const LowRankUnits low(f, round_up(f.tokens, table.in(f.compute).matrix_tokens), table.in(f.compute).matrix_units);
  low.prepare(f);
  run_columns(p, [&](int64_t token, int64_t group, int64_t group_end, const TokenUnits& units, const TokenUnits&, void* scratch) {
    const auto addend = low.addend(token);
    table.turned(f.packed, group * run, std::min(group_end * run, f.rows), f.layout, f.compute, units,
                 std::min(f.tokens - token, p.blocks.tokens), address(addend), f.target.from(token, 0), scratch);
  });
}

// Preparing a token for `tiled`, and turning its sums, take as long as some 13 rows' products; turning a weight as long as that of some
// tokens. Tokens that have to be widened to fp32 are prepared either way. `tiled` multiplies whole vectors of tokens, `turned` whole runs
// of rows.
inline bool turned_is_faster(const ProductSizes& f) {
  const LinearKernels& table = kernels().linear;
  const LinearArithmetic& arithmetic = table.in(f.compute);
  const auto padding = [](int64_t n, int64_t whole) { return round_up(n, whole) - n; };
  if (8 * padding(f.rows, arithmetic.turned_rows) > f.rows) return false;
  const TurnedFrom& from = arithmetic.turned_from;
  const bool as_they_lie = f.compute == Compute::kBFloat16 || f.dtype == DType::kFloat32;
  const int64_t rows = as_they_lie ? from.rows : from.widened_rows;  // of a token
  const bool enough = rows > 0 && f.tokens >= std::clamp<int64_t>(f.rows / rows, from.tokens, kLinearTokens);
  return enough || padding(f.tokens, table.lanes) >= from.padding;
}

enum class ForwardRoute { kDirect, kTiled, kTurned };

inline ForwardRoute forward_route(const ProductSizes& f) {
  if (f.tokens <= kernels().linear.in(f.compute).direct_tokens) return ForwardRoute::kDirect;
  return turned_is_faster(f) ? ForwardRoute::kTurned : ForwardRoute::kTiled;
}

inline ProductSizes forward_sizes(int64_t tokens, int64_t rows, const RowLayout& layout, DType dtype) {
  return {tokens, rows, layout, dtype, forward_compute(dtype, tokens, layout.format, kernels().linear)};
}

inline ProductMemory forward_memory(const ProductSizes& f) {
  switch (forward_route(f)) {
    case ForwardRoute::kDirect: return CallScratch::memory(f.tokens * f.token_bytes());
    case ForwardRoute::kTurned: return turned_product(f, nullptr).memory();
    case ForwardRoute::kTiled: return tiled_product(f).memory();
  }
  return {};
}

inline void run_forward(const Tensor& x, int64_t tokens, const uint8_t* packed, int64_t rows, const RowLayout& layout, DType dtype,
                        const LowRankOperands* low, LinearOutput target) {
  const Forward f{forward_sizes(tokens, rows, layout, dtype), x, packed, low, target};
  switch (forward_route(f)) {
    case ForwardRoute::kDirect: return forward_direct(f);
    case ForwardRoute::kTurned: return forward_turned(f);
    case ForwardRoute::kTiled: return forward_tiled(f);
  }
}

}  // namespace halfbyte::cpu
