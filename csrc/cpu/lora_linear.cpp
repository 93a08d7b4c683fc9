// Fronts of lora_linear and lora_linear_backward_input on the CPU. The thin product x @ A^T is aten's; the branch itself is
// `rank` more terms of every sum of the base product (LowRank in linear_kernels.h): no pass over the output of its own.
#include "linear_driver.h"

namespace halfbyte::cpu {
namespace {

// input (..., K) @ lora_A (R, K)^T in lora_dtype of both. fp16, and bf16 without bf16 units, multiply in fp32 as the base
// product does: aten has no fast kernels for them.
Tensor project(const Tensor& input, const Tensor& lora_A) {
  const ScalarType dtype = lora_dtype(input, lora_A);
  const bool narrow = dtype == ScalarType::BFloat16 && kernels().linear.in(Compute::kBFloat16).any_tokens;
  const ScalarType multiplied = narrow ? dtype : ScalarType::Float;
  return torch::stable::to(
      aten_linear(torch::stable::to(input, multiplied), torch::stable::to(lora_A, multiplied), std::nullopt), dtype);
}

std::tuple<Tensor, Tensor> lora_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias,
                                       const Tensor& lora_A, const Tensor& lora_B, double scaling, std::vector<int64_t> splits,
                                       int64_t format, int64_t block_size, int64_t in_features) {
  constexpr const char* op = "lora_linear";
  const RowLayout layout = checked_linear(op, input, packed, bias, format, block_size, in_features);
  const std::vector<int64_t> groups = checked_lora(op, input, packed, lora_A, lora_B, splits, in_features);
  const int64_t rows = packed.size(0), tokens = leading_numel(input);
  const NoGradGuard no_grad;
  std::optional<Tensor> added;
  if (bias) added = as_contiguous(*bias);
  const Tensor x = as_contiguous(input), weight = as_contiguous(packed);
  const Tensor projected = as_contiguous(project(x, lora_A)), up = as_contiguous(lora_B);
  Tensor output = new_tensor(x, with_last_size(input, rows), x.scalar_type());
  if (rows != 0 && tokens != 0) {
    const DType dtype = checked_dtype(op, "input", x.scalar_type());
    const LowRankOperands low{up, projected, groups, float(scaling)};
    run_forward(x, tokens, weight.const_data_ptr<uint8_t>(), rows, layout, dtype, &low,
                LinearOutput{output.mutable_data_ptr(), added ? added->const_data_ptr() : nullptr, rows, dtype});
  }
  return {output, projected};
}

Tensor lora_linear_backward_input(const Tensor& grad_output, const Tensor& packed, const Tensor& grad_projected,
                                  const Tensor& lora_A, int64_t format, int64_t block_size, int64_t in_features) {
  constexpr const char* op = "lora_linear_backward_input";
  const RowLayout layout = checked_linear_backward(op, grad_output, packed, format, block_size, in_features);
  checked_lora_backward(op, grad_output, grad_projected, lora_A, in_features);
  const int64_t rows = packed.size(0), tokens = leading_numel(grad_output);
  const NoGradGuard no_grad;
  const Tensor grad = as_contiguous(grad_output), weight = as_contiguous(packed);
  const Tensor low_grad = as_contiguous(grad_projected), down = as_contiguous(lora_A);
  Tensor output = new_tensor(grad, with_last_size(grad_output, in_features), grad.scalar_type());
  if (tokens == 0) return output;
  run_backward(grad, tokens, weight.const_data_ptr<uint8_t>(), rows, layout, checked_dtype(op, "grad_output", grad.scalar_type()),
               &down, &low_grad, output.mutable_data_ptr());
  return output;
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) {
  m.impl("lora_linear", TORCH_BOX(&halfbyte::cpu::lora_linear));
  m.impl("lora_linear_backward_input", TORCH_BOX(&halfbyte::cpu::lora_linear_backward_input));
}
