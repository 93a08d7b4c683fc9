// Fronts of lora_linear and its backward ops on CUDA: the branch is the addend that the base product's accumulation
// starts from, so that it makes no pass of its own over what the base wrote.
#include "../lora_adapter.h"
#include "linear_driver.h"

namespace halfbyte::cuda {
namespace {

// bias + projected @ lora_B^T (M, N) in lora_B's dtype, group by group.
Tensor branch(const Tensor& projected, const Tensor& lora_B, const std::optional<Tensor>& bias, const std::vector<int64_t>& groups) {
  if (groups.size() == 1) return aten_linear(projected, lora_B, bias);
  const int64_t rank = lora_B.size(1);
  std::vector<Tensor> parts;
  int64_t first = 0;
  for (size_t g = 0; g < groups.size(); first += groups[g++]) {
    Tensor low = projected, up = lora_B;
    std::optional<Tensor> added;
    if (bias) {
      Tensor all = *bias;
      added = torch::stable::narrow(all, 0, first, groups[g]);
    }
    parts.push_back(aten_linear(torch::stable::narrow(low, 1, int64_t(g) * rank, rank),
                                torch::stable::narrow(up, 0, first, groups[g]), added));
  }
  return aten_cat(parts, 1);
}

// What the mask keeps of rows, a contiguous (M, K): rows itself without a mask, else a copy, or in place.
Tensor kept(const char* op, const Tensor& rows, const std::optional<Tensor>& mask, bool in_place = false) {
  if (!mask) return rows;
  const Tensor output = in_place ? rows : new_tensor(rows, {rows.size(0), rows.size(1)}, rows.scalar_type());
  const LaunchScope scope(op, rows);
  scope.check(launch_keep(rows.const_data_ptr(), checked_dtype(op, "input", rows.scalar_type()), rows.size(0), rows.size(1),
                          mask->const_data_ptr<uint8_t>(), output.mutable_data_ptr(), scope.stream()));
  return output;
}

std::tuple<Tensor, Tensor> lora_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias,
                                       const Tensor& lora_A, const Tensor& lora_B, double scaling, std::vector<int64_t> splits,
                                       int64_t format, int64_t block_size, int64_t in_features, const std::optional<Tensor>& mask) {
  constexpr const char* op = "lora_linear";
  const RowLayout layout = checked_linear(op, input, packed, bias, format, block_size, in_features);
  const std::vector<int64_t> groups = checked_lora(op, input, packed, lora_A, lora_B, splits, in_features);
  const std::optional<Tensor> bits = checked_mask(op, input, in_features, mask);
  const NoGradGuard no_grad;
  const ScalarType dtype = input.scalar_type(), wide = lora_dtype(input, lora_A);
  const Tensor x = as_contiguous(torch::stable::reshape(input, {leading_numel(input), in_features}));
  const Tensor projected = aten_linear(torch::stable::to(kept(op, x, bits), wide), torch::stable::to(lora_A, wide), std::nullopt);
  const Tensor addend = branch(torch::stable::to(scaled(projected, scaling), dtype), torch::stable::to(lora_B, dtype), bias, groups);
  const Tensor output = run_linear(op, x, packed, addend, layout);
  return {torch::stable::reshape(output, with_last_size(input, packed.size(0))),
          torch::stable::reshape(projected, with_last_size(input, lora_A.size(0)))};
}

Tensor lora_linear_backward_input(const Tensor& grad_output, const Tensor& packed, const Tensor& grad_projected,
                                  const Tensor& lora_A, int64_t format, int64_t block_size, int64_t in_features,
                                  const std::optional<Tensor>& mask) {
  constexpr const char* op = "lora_linear_backward_input";
  const RowLayout layout = checked_linear_backward(op, grad_output, packed, format, block_size, in_features);
  checked_lora_backward(op, grad_output, grad_projected, lora_A, in_features);
  const std::optional<Tensor> bits = checked_mask(op, grad_output, in_features, mask);
  const NoGradGuard no_grad;
  const ScalarType dtype = grad_output.scalar_type();
  const int64_t tokens = leading_numel(grad_output);
  const Tensor low = torch::stable::to(torch::stable::reshape(grad_projected, {tokens, lora_A.size(0)}), dtype);
  const Tensor addend = kept(op, as_contiguous(aten_matmul(low, torch::stable::to(lora_A, dtype))), bits, true);
  const Tensor grad = torch::stable::reshape(grad_output, {tokens, packed.size(0)});
  return torch::stable::reshape(run_backward(op, grad, packed, addend, layout), with_last_size(grad_output, in_features));
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
  const Tensor x = as_contiguous(torch::stable::reshape(input, {leading_numel(input), input.size(input.dim() - 1)}));
  return adapter_gradients(grad_output, needs_A ? kept(op, x, bits) : x, projected, lora_B, grad_projected, scaling, groups, needs_A,
                           needs_B);
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) {
  m.impl("lora_linear", TORCH_BOX(&halfbyte::cuda::lora_linear));
  m.impl("lora_linear_backward_input", TORCH_BOX(&halfbyte::cuda::lora_linear_backward_input));
  m.impl("lora_linear_backward_adapter", TORCH_BOX(&halfbyte::cuda::lora_linear_backward_adapter));
}
