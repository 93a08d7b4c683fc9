// What the fronts of linear and lora_linear share: prepare the activations once, split the output over threads.
//
// bf16 inputs multiply in bf16 pairs where the CPU has them and they pay (weights rounded to bf16, as in a dense bf16 layer), a few
// of them 4-bit codes as int16 with AVX2 (errors an eighth of that); everything else, fp16 and bf16 on older CPUs included, multiplies
// exact fp32 weights. Sums are fp32, in an order that depends neither on the number of threads nor on how the work is split.
#pragma once

#include <algorithm>
#include <utility>

#include "../operands.h"
#include "isa.h"
#include "workspace.h"

namespace halfbyte::cpu {

inline Compute compute_for(DType dtype, const LinearKernels& table) {
  return dtype == DType::kBFloat16 && table.in(Compute::kBFloat16).any_tokens ? Compute::kBFloat16 : Compute::kFloat32;
}

inline Compute forward_compute(DType dtype, int64_t tokens, int32_t format, const LinearKernels& table) {
  if (dtype == DType::kBFloat16 && is_4bit(format) && tokens <= table.in(Compute::kInt16).direct_tokens) return Compute::kInt16;
  return tokens <= table.exact_tokens ? Compute::kFloat32 : compute_for(dtype, table);
}

inline int64_t elements_per_unit(Compute compute) { return compute == Compute::kBFloat16 ? 2 : 1; }

// Bytes for `elements` in units of `compute`.
inline Tensor unit_buffer(const Tensor& like, int64_t elements, Compute compute) {
  return new_tensor(like, {elements * (4 / elements_per_unit(compute))}, ScalarType::Byte);
}

inline const char* at_row(const Tensor& t, int64_t row, int64_t row_elements) {
  return static_cast<const char*>(t.const_data_ptr()) + row * row_elements * int64_t(t.element_size());
}

// Rows a thread should get at least: dividing less work costs more than it gains.
inline int64_t row_grain(int64_t work_per_row) { return 1 + (int64_t(1) << 16) / std::max<int64_t>(work_per_row, 1); }

// Rows in whole blocks of `block_rows`, `grain` blocks at least for a thread.
template <class Body>
inline void parallel_blocks(int64_t rows, int64_t block_rows, int64_t grain, const Body& body) {
  parallel_rows((rows + block_rows - 1) / block_rows, grain,
                [&](int64_t begin, int64_t end) { body(begin * block_rows, std::min(end * block_rows, rows)); });
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

// Rows that all calls of `direct` take before the next ones: their codes come from memory once.
constexpr int64_t kPassRows = 16;

// output = x @ packed^T + bias (of `target`) + the low-rank part. x (tokens, K) of dtype, contiguous; tokens and rows are not 0.
inline void run_forward(const Tensor& x, int64_t tokens, const uint8_t* packed, int64_t rows, const RowLayout& layout, DType dtype,
                        const LowRankOperands* low, LinearOutput target) {
  const LinearKernels& table = kernels().linear;
  const Compute compute = forward_compute(dtype, tokens, layout.format, table);
  const bool direct = tokens <= table.in(compute).direct_tokens;
  const int64_t K = layout.in_features, padded = round_up(K, table.group);
  const int64_t block = std::min(tokens, kLinearTokens), width = direct ? tokens : round_up(block, table.tile_tokens);
  // Few tokens' units fit the calling thread's scratch, which no direct kernel takes: an allocation less (1.5 us).
  const int64_t units_bytes = width * padded * (4 / elements_per_unit(compute));
  std::optional<WorkspaceLease> kept;
  std::optional<Tensor> fresh;
  if (direct && units_bytes <= kWorkspaceLimit) kept.emplace(units_bytes);
  else fresh = unit_buffer(x, width * padded, compute);
  void* prepared = kept ? kept->data() : fresh->mutable_data_ptr();
  LowRank addend{};
  DType low_dtype{};
  std::optional<Tensor> low_weight, low_input;
  if (low) {
    addend.rank = low->input.size(low->input.dim() - 1);
    addend.stride = round_up((addend.rank + elements_per_unit(compute) - 1) / elements_per_unit(compute), table.lanes);
    low_dtype = checked_dtype("lora_linear", "projected", low->input.scalar_type());
    low_weight = low_rank_weight(*low, compute, addend.stride);
    low_input = unit_buffer(x, width * addend.stride * elements_per_unit(compute), compute);
    addend.weight = low_weight->const_data_ptr();
    addend.input = low_input->const_data_ptr();
  }
  const int64_t output_row = target.stride * (target.dtype == DType::kFloat32 ? 4 : 2);
  if (direct) {
    const auto units_of = [&](int64_t m) { return static_cast<char*>(prepared) + units_bytes / tokens * m; };
    for (int64_t m = 0; m < tokens; m += kPassTokens)
      table.prepare_direct(at_row(x, m, K), dtype, std::min(tokens - m, kPassTokens), layout, compute, units_of(m));
    if (low) {
      torch::stable::zero_(*low_input);
      table.prepare_low_rank(low->input.const_data_ptr(), low_dtype, tokens, addend.rank, low->factor, compute, 0, addend.stride,
                             low_input->mutable_data_ptr());
    }
    parallel_rows(rows, row_grain(K), [&](int64_t begin, int64_t end) {
      const int64_t step = tokens <= kPassTokens ? end - begin : kPassRows;
      for (int64_t row = begin; row < end; row += step) {
        for (int64_t m = 0; m < tokens; m += kPassTokens) {
          LowRank part = addend;
          if (low) part.input = static_cast<const char*>(addend.input) + m * addend.stride * 4;
          const LinearOutput to{static_cast<char*>(target.data) + m * output_row, target.bias, target.stride, target.dtype};
          table.direct(packed, row, std::min(row + step, end), layout, compute, units_of(m), std::min(tokens - m, kPassTokens),
                       low ? &part : nullptr, to);
        }
      }
    });
    return;
  }
  const LowRank* const added = low ? &addend : nullptr;
  for (int64_t m = 0; m < tokens; m += kLinearTokens) {
    const int64_t count = std::min(tokens - m, kLinearTokens);
    const char* source = at_row(x, m, K);
    const int64_t tiles = (count + table.tile_tokens - 1) / table.tile_tokens;
    parallel_rows(tiles, row_grain(K * table.tile_tokens), [&](int64_t begin, int64_t end) {
      table.prepare_tiled(source, dtype, count, layout, compute, begin, end, prepared);
    });
    if (low)
      table.prepare_low_rank_tiled(at_row(low->input, m, addend.rank), low_dtype, count, addend.rank, low->factor, compute,
                                   low_input->mutable_data_ptr());
    parallel_blocks(rows, table.in(compute).block_rows, row_grain(K * count), [&](int64_t begin, int64_t end) {
      const WorkspaceLease scratch(table.scratch_bytes);
      table.tiled(packed, begin, end, layout, compute, prepared, count, added, target, scratch.data());
    });
    target.data = static_cast<char*>(target.data) + output_row * count;
  }
}

// Tokens of a block of the backward, which threads share out by blocks and groups of columns: 5 groups (K = 576) are no even work for 2
// threads, and none at all for most of 16. Every block decodes anew, which takes as long as multiplying kDecodingTokens tokens.
inline int64_t backward_block(int64_t tokens, int64_t groups) {
  constexpr int64_t kDecodingTokens = 16, kMultiple = 16;  // of every gradient_tokens
  const int64_t threads = torch::stable::get_num_threads(), most = std::min(tokens, kLinearTokens);
  int64_t best = 0, least = 0;
  for (int64_t parts = 1; parts <= threads && (parts == 1 || most / parts >= kMultiple); ++parts) {
    const int64_t block = round_up((most + parts - 1) / parts, kMultiple);
    const int64_t work = (tokens + block - 1) / block * groups;
    const int64_t time = (work + threads - 1) / threads * (std::min(block, tokens) + kDecodingTokens);
    if (parts == 1 || time < least) best = block, least = time;
  }
  return best;
}

// matrix (tokens, columns) as `backward` takes it: block after block.
struct PreparedGradients {
  Tensor units;
  int64_t stride;  // units of each token in a block

  const void* block(int64_t first_token) const {
    return static_cast<const char*>(units.const_data_ptr()) + first_token * stride * 4;
  }
};

// `block`: backward_block's.
inline PreparedGradients prepare_gradients(const Tensor& matrix, DType dtype, int64_t tokens, int64_t columns, Compute compute,
                                           int64_t block) {
  const LinearKernels& table = kernels().linear;
  const int64_t elements = elements_per_unit(compute), together = table.in(compute).gradient_tokens;
  const int64_t stride = round_up((columns + elements - 1) / elements, table.in(compute).gradient_units);
  Tensor units = unit_buffer(matrix, round_up(tokens, together) * stride * elements, compute);
  auto* out = static_cast<char*>(units.mutable_data_ptr());
  const int64_t strips = block / together, all = (tokens + together - 1) / together;
  parallel_rows(all, row_grain(columns * together), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const int64_t token = at / strips * block, last = std::min(end, (at / strips + 1) * strips);
      const int64_t count = std::min(tokens - token, block);
      table.prepare_gradients(at_row(matrix, token, columns), dtype, count, columns, compute, at * together - token,
                              std::min(last * together - token, count), out + token * stride * 4);
      at = last;
    }
  });
  return {std::move(units), stride};
}

// output (tokens, K) = grad (tokens, N) @ packed, plus low_input (tokens, rank) @ low_weight (rank, K) where they are given.
// All contiguous; tokens and N are not 0.
inline void run_backward(const Tensor& grad, int64_t tokens, const uint8_t* packed, int64_t rows, const RowLayout& layout,
                         DType dtype, const Tensor* low_weight, const Tensor* low_input, void* output) {
  const LinearKernels& table = kernels().linear;
  const Compute compute = compute_for(dtype, table);
  const int64_t K = layout.in_features;
  const int64_t groups = (K + table.group - 1) / table.group, block = backward_block(tokens, groups);
  const PreparedGradients source = prepare_gradients(grad, dtype, tokens, rows, compute, block);
  LowRank addend{};
  std::optional<Tensor> weight_units;
  std::optional<PreparedGradients> low;
  if (low_weight) {
    constexpr const char* op = "lora_linear_backward_input";
    addend.rank = low_weight->size(0);
    weight_units = unit_buffer(grad, addend.rank * round_up(K, table.group), compute);
    table.prepare_direct(low_weight->const_data_ptr(), checked_dtype(op, "lora_A", low_weight->scalar_type()), addend.rank, layout,
                         compute, weight_units->mutable_data_ptr());
    low = prepare_gradients(*low_input, checked_dtype(op, "grad_projected", low_input->scalar_type()), tokens, addend.rank, compute,
                            block);
    addend.weight = weight_units->const_data_ptr();
  }
  const int64_t output_row = K * (dtype == DType::kFloat32 ? 4 : 2);
  auto* target = static_cast<char*>(output);
  const int64_t work = (tokens + block - 1) / block * groups;
  parallel_rows(work, row_grain(rows * table.group * std::min(tokens, block)), [&](int64_t begin, int64_t end) {
    const WorkspaceLease scratch(table.scratch_bytes);
    LowRank mine = addend;
    for (int64_t at = begin; at < end;) {
      const int64_t group = at % groups, group_end = std::min(groups, group + end - at), token = at / groups * block;
      if (low) mine.input = low->block(token);
      table.backward(packed, rows, group, group_end, layout, compute, source.block(token), std::min(tokens - token, block),
                     low ? &mine : nullptr, LinearOutput{target + token * output_row, nullptr, K, dtype}, scratch.data());
      at += group_end - group;
    }
  });
}

}  // namespace halfbyte::cpu
