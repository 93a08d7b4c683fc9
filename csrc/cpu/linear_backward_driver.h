// What the fronts of linear's and lora_linear's backward share.
#pragma once

#include "linear_driver.h"

namespace halfbyte::cpu {

// output (tokens, K) = grad (tokens, N) @ packed, plus low_input (tokens, rank) @ low_weight (rank, K) where they are given.
struct Backward {
  const Tensor& grad;
  int64_t tokens;
  const uint8_t* packed;
  int64_t rows;
  const RowLayout& layout;
  DType dtype;
  const Tensor *low_weight, *low_input;
  LinearOutput target;
  Compute compute;

  int64_t groups() const { return (layout.in_features + kernels().linear.group - 1) / kernels().linear.group; }
};

// The low-rank part of a backward in units of `compute`: its weight, and its input as it was given.
struct LowRankColumns {
  LowRank addend;
  Tensor weight;
  TokenMatrix input;

  LowRankColumns(const Backward& b, Compute compute)
      : addend{nullptr, nullptr, false, b.low_weight->size(0), b.groups() * kernels().linear.group / elements_per_unit(compute)},
        weight(unit_buffer(b.grad, addend.rank * addend.stride * elements_per_unit(compute), compute)),
        input(*b.low_input, checked_dtype(kOp, "grad_projected", b.low_input->scalar_type()), b.tokens, addend.rank, compute) {
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

// Few tokens, rows added up straight from their codes.
inline void backward_direct(const Backward& b) {
  constexpr int64_t kSliceRows = 256, kMostSlices = 8;  // slices' sums are little beside their codes, and enough for threads to share
  const LinearKernels& table = kernels().linear;
  const int64_t groups = b.groups(), stride = groups * table.group;
  const int64_t wanted = std::clamp<int64_t>(b.rows / kSliceRows, 1, kMostSlices);
  const int64_t step = round_up(std::max<int64_t>(1, (b.rows + wanted - 1) / wanted), 16);
  const int64_t slices = (b.rows + step - 1) / step;
  const CallScratch scratch(b.grad, slices * b.tokens * stride * 4);
  auto* const sums = static_cast<float*>(scratch.data());
  parallel_rows(slices * groups, row_grain(step * table.group), [&](int64_t begin, int64_t end) {
    for (int64_t work = begin; work < end;) {
      const int64_t slice = work / groups, row = slice * step, group = work % groups, group_end = std::min(groups, group + end - work);
      table.backward_direct(b.packed + row * b.layout.row_bytes, std::min(step, b.rows - row), group, group_end, b.layout, b.compute,
                            at_row(b.grad, row, 1), b.dtype, b.rows, b.tokens, sums + slice * b.tokens * stride, stride);
      work += group_end - group;
    }
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

// More tokens, columns decoded into panels.
inline void backward_tiled(const Backward& b) {
  const LinearKernels& table = kernels().linear;
  const TokenMatrix source(b.grad, b.dtype, b.tokens, b.rows, b.compute);
  const int64_t groups = b.groups(), block = column_block(source, groups);
  std::optional<LowRankColumns> low;
  if (b.low_weight) low.emplace(b, b.compute);
  const auto multiply = [&](int64_t token, int64_t group, int64_t group_end, const TokenUnits& units, const TokenUnits& low_units,
                            void* scratch) {
    std::optional<LowRank> addend;
    if (low) addend = low->with(low_units);
    table.backward(b.packed, b.rows, group, group_end, b.layout, b.compute, units, std::min(b.tokens - token, block), address(addend),
                   b.target.from(token, 0), scratch);
  };
  run_columns(source, low ? &low->input : nullptr, b.tokens, block, groups,
              row_grain(b.rows * table.group * std::min(b.tokens, block)),
              table.backward_scratch(b.compute, std::min(b.tokens, block), b.rows, groups, low ? low->addend.rank : 0), multiply);
}

// All contiguous; tokens are not 0, nor is N where nothing else is added.
inline void run_backward(const Tensor& grad, int64_t tokens, const uint8_t* packed, int64_t rows, const RowLayout& layout,
                         DType dtype, const Tensor* low_weight, const Tensor* low_input, void* output) {
  const LinearKernels& table = kernels().linear;
  const Compute compute = tokens <= table.exact_tokens ? Compute::kFloat32 : compute_for(dtype, table);
  const LinearOutput target{output, nullptr, layout.in_features, dtype};
  const Backward b{grad, tokens, packed, rows, layout, dtype, low_weight, low_input, target, compute};
  if (tokens <= kPassTokens) backward_direct(b);
  else backward_tiled(b);
}

}  // namespace halfbyte::cpu
