// Fronts of lora_linear and its backward ops on the CPU. The branch itself is `rank` more terms of every sum of the base product
// (LowRank in linear_kernels.h): no pass over the output of its own. What else there is, x @ A^T and the gradients of A, B and x @ A^T,
// are thin products (thin_driver.h); they read what dropout keeps of x from x itself and the mask.
#include <functional>

#include "linear_backward_driver.h"
#include "linear_driver.h"
#include "lora_adapter.h"
#include "thin_driver.h"

namespace halfbyte::cpu {
namespace {

// Whether to leave products to aten. Its ones of bf16 by bf16 use bf16 units where there are any, but a call costs more than few
// multiply-adds, and of few ranks they take as long without tiles (csrc/README.md). The limit is `share` times as high.
bool aten_is_faster(ScalarType dtype, int64_t ranks, int64_t multiply_adds, int64_t share) {
  const ThinKernels& thin = kernels().thin;
  if (dtype != ScalarType::BFloat16 || !kernels().linear.in(Compute::kBFloat16).any_tokens) return false;
  return multiply_adds / share > (ranks <= kFewRanks ? thin.few_ranks_most : thin.many_ranks_most);
}

// What the mask keeps of input (..., K), times lora_A (R, K)^T, in lora_dtype of both.
Tensor project(const char* op, const Tensor& input, const Tensor& lora_A, const std::optional<Tensor>& mask) {
  const ScalarType dtype = lora_dtype(input, lora_A);
  const int64_t ranks = lora_A.size(0);
  const MatrixView x = matrix_view(op, "input", input, mask);
  if (!mask && aten_is_faster(dtype, ranks, x.rows * x.columns * ranks, 1)) return as_contiguous(aten_linear(input, lora_A, std::nullopt));
  const Tensor result = new_tensor(input, with_last_size(input, ranks), dtype);
  const ThinFloats weight = thin_weight(input, matrix_view(op, "lora_A", lora_A));
  const ThinFloats sums = dtype == ScalarType::Float ? ThinFloats{result, ranks} : thin_floats(input, x.rows, x.rows, ranks);
  thin_project(x, weight, ranks, sums.row(0), ranks);
  if (dtype != ScalarType::Float) store_rows(sums, ranks, result, checked_dtype(op, "input", dtype));
  return result;
}

std::tuple<Tensor, Tensor> lora_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias,
                                       const Tensor& lora_A, const Tensor& lora_B, double scaling, std::vector<int64_t> splits,
                                       int64_t format, int64_t block_size, int64_t in_features, const std::optional<Tensor>& mask) {
  constexpr const char* op = "lora_linear";
  const RowLayout layout = checked_linear(op, input, packed, bias, format, block_size, in_features);
  const std::vector<int64_t> groups = checked_lora(op, input, packed, lora_A, lora_B, splits, in_features);
  const std::optional<Tensor> kept = checked_mask(op, input, in_features, mask);
  const int64_t rows = packed.size(0), tokens = leading_numel(input);
  const NoGradGuard no_grad;
  std::optional<Tensor> added;
  if (bias) added = as_contiguous(*bias);
  const Tensor x = as_contiguous(input), weight = as_contiguous(packed);
  const Tensor projected = project(op, x, as_contiguous(lora_A), kept), up = as_contiguous(lora_B);
  Tensor output = new_buffer(x, with_last_size(input, rows), x.scalar_type());
  if (rows != 0 && tokens != 0) {
    const DType dtype = checked_dtype(op, "input", x.scalar_type());
    const LowRankOperands low{up, projected, groups, float(scaling)};
    run_forward(x, tokens, weight.const_data_ptr<uint8_t>(), rows, layout, dtype, &low,
                LinearOutput{output.mutable_data_ptr(), added ? added->const_data_ptr() : nullptr, rows, dtype});
  }
  return {output, projected};
}

Tensor lora_linear_backward_input(const Tensor& grad_output, const Tensor& packed, const Tensor& grad_projected,
                                  const Tensor& lora_A, int64_t format, int64_t block_size, int64_t in_features,
                                  const std::optional<Tensor>& mask) {
  constexpr const char* op = "lora_linear_backward_input";
  const RowLayout layout = checked_linear_backward(op, grad_output, packed, format, block_size, in_features);
  checked_lora_backward(op, grad_output, grad_projected, lora_A, in_features);
  const std::optional<Tensor> kept = checked_mask(op, grad_output, in_features, mask);
  const int64_t rows = packed.size(0), tokens = leading_numel(grad_output);
  const NoGradGuard no_grad;
  const Tensor grad = as_contiguous(grad_output), weight = as_contiguous(packed);
  const Tensor low_grad = as_contiguous(grad_projected), down = as_contiguous(lora_A);
  Tensor output = new_buffer(grad, with_last_size(grad_output, in_features), grad.scalar_type());
  if (tokens == 0) return output;
  const DType dtype = checked_dtype(op, "grad_output", grad.scalar_type());
  const auto* codes = weight.const_data_ptr<uint8_t>();
  if (!kept) {
    run_backward(grad, tokens, codes, rows, layout, dtype, &down, &low_grad, output.mutable_data_ptr());
    return output;
  }
  // The mask is for the branch alone, whose terms a sum would not tell from the others.
  if (rows == 0) torch::stable::zero_(output);
  else run_backward(grad, tokens, codes, rows, layout, dtype, nullptr, nullptr, output.mutable_data_ptr());
  thin_add_kept(thin_tokens(low_grad, matrix_view(op, "grad_projected", low_grad), 1.0f),
                thin_weight(down, matrix_view(op, "lora_A", down)), down.size(0), *kept, in_features,
                LinearOutput{output.mutable_data_ptr(), nullptr, in_features, dtype});
  return output;
}

std::tuple<Tensor, Tensor, Tensor> lora_linear_backward_adapter(const Tensor& grad_output, const Tensor& input,
                                                                const Tensor& projected, const Tensor& lora_B,
                                                                const std::optional<Tensor>& grad_projected, double scaling,
                                                                std::vector<int64_t> splits, bool needs_A, bool needs_B,
                                                                const std::optional<Tensor>& mask) {
  constexpr const char* op = "lora_linear_backward_adapter";
  const std::vector<int64_t> groups = checked_lora_adapter(op, grad_output, input, projected, lora_B, grad_projected, splits);
  const std::optional<Tensor> kept = checked_mask(op, input, input.size(input.dim() - 1), mask);
  const NoGradGuard no_grad;
  const Tensor grad = as_contiguous(grad_output), x = as_contiguous(input), low = as_contiguous(projected), up = as_contiguous(lora_B);
  const MatrixView rows = matrix_view(op, "grad_output", grad), columns = matrix_view(op, "input", x, kept);
  const MatrixView coefficients = matrix_view(op, "projected", low), weight = matrix_view(op, "lora_B", up);
  const int64_t tokens = rows.rows, rank = weight.columns, stacked = coefficients.columns;
  // Around its three products aten sums, scales and joins.
  if (!kept && aten_is_faster(low.scalar_type(), rank, tokens * (2 * weight.rows * rank + columns.columns * stacked), 4))
    return adapter_gradients(grad, x, low, up, grad_projected, scaling, groups, needs_A, needs_B);
  const Tensor grad_low = new_tensor(low, with_last_size(low, stacked), low.scalar_type());
  const auto gradient = [&](bool needed, int64_t of_rows, int64_t of_columns) {
    return new_tensor(up, needed ? std::vector<int64_t>{of_rows, of_columns} : std::vector<int64_t>{0}, up.scalar_type());
  };
  const Tensor grad_A = gradient(needs_A, stacked, columns.columns), grad_B = gradient(needs_B, weight.rows, rank);
  // In fp32 up to here: lora_A's gradient multiplies it.
  const ThinFloats sums = thin_floats(low, 0, tokens, round_up(stacked, kernels().thin.ranks));
  int64_t first = 0;
  for (size_t g = 0; g < groups.size(); first += groups[g++]) {
    const MatrixView of_group = rows.part(0, tokens, first, groups[g]);
    const ThinFloats turned = thin_weight_turned(up, weight.part(first, groups[g], 0, rank), float(scaling));
    thin_project(of_group, turned, rank, sums.row(0) + int64_t(g) * rank, sums.stride);
    if (!needs_B) continue;
    const ThinFloats thin = thin_tokens(low, coefficients.part(0, tokens, int64_t(g) * rank, rank), float(scaling));
    thin_gradient(of_group, thin, rank, static_cast<char*>(grad_B.mutable_data_ptr()) + first * rank * int64_t(up.element_size()),
                  weight.dtype, 1, rank);
  }
  if (grad_projected) {
    const Tensor given = as_contiguous(*grad_projected);
    const ThinFloats more = thin_tokens(low, matrix_view(op, "grad_projected", given), 1.0f);
    std::transform(sums.row(0), sums.row(tokens), more.row(0), sums.row(0), std::plus<float>());
  }
  store_rows(sums, stacked, grad_low, coefficients.dtype);
  if (needs_A) thin_gradient(columns, sums, stacked, grad_A.mutable_data_ptr(), weight.dtype, columns.columns, 1);
  return {grad_low, grad_A, grad_B};
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) {
  halfbyte::impl_both(m, "lora_linear", TORCH_BOX(&halfbyte::cpu::lora_linear));
  halfbyte::impl_both(m, "lora_linear_backward_input", TORCH_BOX(&halfbyte::cpu::lora_linear_backward_input));
  halfbyte::impl_both(m, "lora_linear_backward_adapter", TORCH_BOX(&halfbyte::cpu::lora_linear_backward_adapter));
}
