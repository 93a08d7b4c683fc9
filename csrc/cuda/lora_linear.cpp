// Fronts of lora_linear and its backward ops on CUDA: the branch is what the base product's accumulation starts from, in the
// output's own memory, so that neither makes a pass of its own over what the other wrote.
//
// Products with A and B are aten's (addmm_out), `scaling` their factor. Legend: M tokens, N rows of packed, K in_features, r rank.
#include "linear_driver.h"

namespace halfbyte::cuda {
namespace {

// What the mask keeps of rows, a contiguous (M, K): rows itself without a mask, else a copy, or in place.
Tensor kept(const char* op, const Tensor& rows, const std::optional<Tensor>& mask, bool in_place = false) {
  if (!mask) return rows;
  const Tensor output = in_place ? rows : new_tensor(rows, {rows.size(0), rows.size(1)}, rows.scalar_type());
  const LaunchScope scope(op, rows);
  scope.check(launch_keep(rows.const_data_ptr(), checked_dtype(op, "input", rows.scalar_type()), rows.size(0), rows.size(1),
                          mask->const_data_ptr<uint8_t>(), output.mutable_data_ptr(), scope.stream()));
  return output;
}

// t's elements as a contiguous matrix of `dtype`.
Tensor as_matrix(const Tensor& t, ScalarType dtype) { return matrix_of(as_contiguous(as_dtype(t, dtype))); }

std::tuple<Tensor, Tensor> lora_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias,
                                       const Tensor& lora_A, const Tensor& lora_B, double scaling, std::vector<int64_t> splits,
                                       int64_t format, int64_t block_size, int64_t in_features, const std::optional<Tensor>& mask) {
  constexpr const char* op = "lora_linear";
  const RowLayout layout = checked_linear(op, input, packed, bias, format, block_size, in_features);
  const std::vector<int64_t> groups = checked_lora(op, input, packed, lora_A, lora_B, splits, in_features);
  const std::optional<Tensor> bits = checked_mask(op, input, in_features, mask);
  const NoGradGuard no_grad;
  const LaunchScope scope(op, packed);
  const ScalarType dtype = input.scalar_type(), wide = lora_dtype(input, lora_A);
  const int64_t tokens = leading_numel(input), N = packed.size(0), rank = lora_B.size(1), stacked = lora_A.size(0);
  const Tensor contiguous = as_contiguous(input), x = matrix_of(contiguous);
  const Tensor projected = new_tensor(contiguous, with_last_size(input, stacked), wide), low = matrix_of(projected);
  addmm_out(op, low, low, as_dtype(kept(op, x, bits), wide), transposed(as_matrix(lora_A, wide)), 0, 1);
  const Tensor output = new_tensor(contiguous, with_last_size(input, N), dtype), sums = matrix_of(output);
  const Tensor coefficients = as_dtype(low, dtype), up = as_matrix(lora_B, dtype);
  int64_t first = 0;
  for (size_t g = 0; g < groups.size(); first += groups[g++]) {
    const Tensor part = matrix_in(sums, tokens, groups[g], N, first);
    Tensor self = bias ? *bias : part;  // a row of one dimension: cuBLAS adds it at the end of the product
    if (bias && groups.size() > 1) self = torch::stable::narrow(self, 0, first, groups[g]);
    addmm_out(op, part, self, matrix_in(coefficients, tokens, rank, stacked, int64_t(g) * rank),
              transposed(matrix_in(up, groups[g], rank, rank, first * rank)), bias ? 1 : 0, scaling);
  }
  linear_into(op, x, packed, sums, layout, sums);
  return {output, projected};
}

Tensor lora_linear_backward_input(const Tensor& grad_output, const Tensor& packed, const Tensor& grad_projected,
                                  const Tensor& lora_A, int64_t format, int64_t block_size, int64_t in_features,
                                  const std::optional<Tensor>& mask) {
  constexpr const char* op = "lora_linear_backward_input";
  const RowLayout layout = checked_linear_backward(op, grad_output, packed, format, block_size, in_features);
  checked_lora_backward(op, grad_output, grad_projected, lora_A, in_features);
  const std::optional<Tensor> bits = checked_mask(op, grad_output, in_features, mask);
  const NoGradGuard no_grad;
  const LaunchScope scope(op, packed);
  const ScalarType dtype = grad_output.scalar_type();
  const Tensor grad = as_contiguous(grad_output);
  const Tensor output = new_tensor(grad, with_last_size(grad_output, in_features), dtype), sums = matrix_of(output);
  addmm_out(op, sums, sums, as_matrix(grad_projected, dtype), as_matrix(lora_A, dtype), 0, 1);
  backward_into(op, matrix_of(grad), packed, kept(op, sums, bits, true), layout, sums);
  return output;
}

std::tuple<Tensor, Tensor, Tensor> lora_linear_backward_adapter(const Tensor& grad_output, const Tensor& input,
                                                                const Tensor& projected, const Tensor& lora_B,
                                                                const std::optional<Tensor>& grad_projected, double scaling,
                                                                std::vector<int64_t> splits, bool needs_A, bool needs_B,
                                                                const std::optional<Tensor>& mask) {
  constexpr const char* op = "lora_linear_backward_adapter";
  const std::vector<int64_t> groups = checked_lora_adapter(op, grad_output, input, projected, lora_B, grad_projected, splits);
  const std::optional<Tensor> bits = checked_mask(op, input, input.size(input.dim() - 1), mask);
  const NoGradGuard no_grad;
  const ScalarType dtype = projected.scalar_type(), given = lora_B.scalar_type();
  const int64_t tokens = leading_numel(input), N = lora_B.size(0), rank = lora_B.size(1), stacked = int64_t(groups.size()) * rank;
  const int64_t in_features = input.size(input.dim() - 1);
  const Tensor grad = as_matrix(grad_output, dtype), coefficients = as_matrix(projected, dtype), up = as_matrix(lora_B, dtype);
  const Tensor grad_low = new_tensor(grad, with_last_size(projected, stacked), dtype), low = matrix_of(grad_low);
  const Tensor added = grad_projected ? as_matrix(*grad_projected, dtype) : low;  // low only stands for none
  const auto gradient = [&](bool needed, int64_t rows, int64_t columns) {
    return new_tensor(grad, needed ? std::vector<int64_t>{rows, columns} : std::vector<int64_t>{0}, needed ? dtype : given);
  };
  const Tensor grad_A = gradient(needs_A, stacked, in_features), grad_B = gradient(needs_B, N, rank);
  int64_t first = 0;
  for (size_t g = 0; g < groups.size(); first += groups[g++]) {
    const int64_t at = int64_t(g) * rank;
    const Tensor part = matrix_in(grad, tokens, groups[g], N, first), target = matrix_in(low, tokens, rank, stacked, at);
    addmm_out(op, target, grad_projected ? matrix_in(added, tokens, rank, stacked, at) : target, part,
              matrix_in(up, groups[g], rank, rank, first * rank), grad_projected ? 1 : 0, scaling);
    if (!needs_B) continue;
    const Tensor of_B = matrix_in(grad_B, groups[g], rank, rank, first * rank);
    addmm_out(op, of_B, of_B, transposed(part), matrix_in(coefficients, tokens, rank, stacked, at), 0, scaling);
  }
  if (needs_A) {
    const Tensor contiguous = as_contiguous(input), x = as_dtype(kept(op, matrix_of(contiguous), bits), dtype);
    addmm_out(op, grad_A, grad_A, transposed(low), x, 0, 1);
  }
  return {grad_low, as_dtype(grad_A, given), as_dtype(grad_B, given)};
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) {
  halfbyte::impl_both(m, "lora_linear", TORCH_BOX(&halfbyte::cuda::lora_linear));
  halfbyte::impl_both(m, "lora_linear_backward_input", TORCH_BOX(&halfbyte::cuda::lora_linear_backward_input));
  halfbyte::impl_both(m, "lora_linear_backward_adapter", TORCH_BOX(&halfbyte::cuda::lora_linear_backward_adapter));
}
