// What the fronts of linear's and lora_linear's backward share.
#pragma once

#include "columns_driver.h"

namespace halfbyte::cpu {

// output (tokens, K) = grad (tokens, N) @ packed, plus low_input (tokens, rank) @ low_weight (rank, K) where they are given.
struct Backward : ProductSizes {
  const Tensor& grad;
  const uint8_t* packed;
  const Tensor *low_weight, *low_input;
  LinearOutput target;
};

inline int64_t column_groups(const ProductSizes& b) {
  return parts_of(b.layout.in_features, kernels().linear.group);
}

// The low-rank part of a backward in units of `compute`: its weight, and its input as it was given.
struct LowRankColumns {
  LowRank addend;
  Tensor weight;
  TokenMatrix input;

  LowRankColumns(const Backward& b, Compute compute)
      : addend{nullptr, nullptr, false, b.low_weight->size(0), column_groups(b) * kernels().linear.group / elements_per_unit(compute)},
        weight(unit_buffer(b.grad, addend.rank * addend.stride * elements_per_unit(compute), compute)),
        input(b.low_input, checked_dtype(kOp, "grad_projected", b.low_input->scalar_type()), b.tokens, addend.rank, compute) {
    const int64_t K = b.layout.in_features;
    if (addend.stride * elements_per_unit(compute) != K) torch::stable::zero_(weight);
    kernels().linear.prepare_low_rank(b.low_weight->const_data_ptr(), checked_dtype(kOp, "lora_A", b.low_weight->scalar_type()),
                                      addend.rank, K, 1.0f, compute, 0, addend.stride, weight.mutable_data_ptr());
    addend.weight = weight.const_data_ptr();
  }
  // With the prepared input of some tokens.
  LowRank with(const TokenUnits& units) const { return {addend.weight, units.data, units.as_it_lies, addend.rank, addend.stride}; }

 private:
  static constexpr const char* kOp = "lora_linear_backward_input";
};

// Rows of a weight whose sums are added up apart from each other, so that threads may share them.
struct RowSlices {
  int64_t step, slices;
  int64_t sums_bytes;

  explicit RowSlices(const ProductSizes& b) {
    constexpr int64_t kSliceRows = 256, kMostSlices = 8;  // slices' sums are little beside their codes, and enough for threads to share
    const int64_t wanted = std::clamp<int64_t>(b.rows / kSliceRows, 1, kMostSlices);
    step = round_up(std::max<int64_t>(1, (b.rows + wanted - 1) / wanted), 16);
    slices = (b.rows + step - 1) / step;
    sums_bytes = slices * b.tokens * column_groups(b) * kernels().linear.group * 4;
  }
};

// Few tokens, rows added up straight from their codes.
inline void backward_direct(const Backward& b) {
  const LinearKernels& table = kernels().linear;
  const int64_t groups = column_groups(b), stride = groups * table.group;
  const auto [step, slices, sums_bytes] = RowSlices(b);
  const CallScratch scratch(b.grad, sums_bytes);
  auto* const sums = static_cast<float*>(scratch.data());
  parallel_groups(slices, groups, row_grain(step * table.group * b.tokens), [&](int64_t slice, int64_t group, int64_t group_end) {
    const int64_t row = slice * step;
    table.backward_direct(b.packed + row * b.layout.row_bytes, std::min(step, b.rows - row), group, group_end, b.layout, b.compute,
                          at_row(b.grad, row, 1), b.dtype, b.rows, b.tokens, sums + slice * b.tokens * stride, stride);
  });
  std::optional<LowRankColumns> low;
  std::optional<Tensor> input;
  std::optional<LowRank> addend;
  if (b.low_weight) {
    low.emplace(b, Compute::kFloat32);
    input = prepare_matrix(low->input, b.tokens, b.tokens);
    addend = low->with({input->const_data_ptr(), low->input.ready()});
  }
  parallel_rows(groups, row_grain(table.group * b.tokens * (slices + (low ? addend->rank : 0))), [&](int64_t begin, int64_t end) {
    table.finish_backward(sums, slices, b.tokens, stride, begin, end, b.layout, b.compute, address(addend), b.target);
  });
}

inline ColumnsProduct backward_product(const ProductSizes& b, const Tensor* grad, const std::optional<TokenMatrix>& low) {
  const LinearKernels& table = kernels().linear;
  const int64_t groups = column_groups(b), rank = low ? low->columns : 0;
  return columns_product(TokenMatrix(grad, b.dtype, b.tokens, b.rows, b.compute), low, groups, b.layout.in_features,
                         b.rows * table.group,
                         [&](int64_t tokens) { return table.backward_scratch(b.compute, tokens, b.rows, groups, rank); });
}

// More tokens, columns decoded into panels.
inline void backward_tiled(const Backward& b) {
  const LinearKernels& table = kernels().linear;
  std::optional<LowRankColumns> low;
  if (b.low_weight) low.emplace(b, b.compute);
  const ColumnsProduct p = backward_product(b, &b.grad, low ? std::optional(low->input) : std::nullopt);
  run_columns(p, [&](int64_t token, int64_t group, int64_t group_end, const TokenUnits& units, const TokenUnits& low_units,
                     void* scratch) {
    std::optional<LowRank> addend;
    if (low) addend = low->with(low_units);
    table.backward(b.packed, b.rows, group, group_end, b.layout, b.compute, units, std::min(b.tokens - token, p.blocks.tokens),
                   address(addend), b.target.from(token, 0), scratch);
  });
}

inline ProductSizes backward_sizes(int64_t tokens, int64_t rows, const RowLayout& layout, DType dtype) {
  const LinearKernels& table = kernels().linear;
  return {tokens, rows, layout, dtype, tokens <= table.exact_tokens ? Compute::kFloat32 : compute_for(dtype, table)};
}

// With a low-rank part of `rank`, whose input has the dtype of the gradients, or 0.
inline ProductMemory backward_memory(const ProductSizes& b, int64_t rank) {
  if (b.tokens <= kPassTokens) return CallScratch::memory(RowSlices(b).sums_bytes);
  std::optional<TokenMatrix> low;
  if (rank != 0) low.emplace(nullptr, b.dtype, b.tokens, rank, b.compute);
  return backward_product(b, nullptr, low).memory();
}

// All contiguous; tokens are not 0, nor is N where nothing else is added.
inline void run_backward(const Tensor& grad, int64_t tokens, const uint8_t* packed, int64_t rows, const RowLayout& layout,
                         DType dtype, const Tensor* low_weight, const Tensor* low_input, void* output) {
  const LinearOutput target{output, nullptr, layout.in_features, dtype};
  const Backward b{backward_sizes(tokens, rows, layout, dtype), grad, packed, low_weight, low_input, target};
  if (tokens <= kPassTokens) backward_direct(b);
  else backward_tiled(b);
}

}  // namespace halfbyte::cpu
