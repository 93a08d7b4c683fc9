// Fronts of linear and linear_backward_input on the CPU: check, allocate, and let linear_driver.h and linear_backward_driver.h run the
// kernels.
#include "linear_backward_driver.h"
#include "linear_driver.h"

namespace halfbyte::cpu {
namespace {

Tensor linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t format,
              int64_t block_size, int64_t in_features) {
  constexpr const char* op = "linear";
  const RowLayout layout = checked_linear(op, input, packed, bias, format, block_size, in_features);
  const int64_t rows = packed.size(0), tokens = leading_numel(input);
  const NoGradGuard no_grad;
  std::optional<Tensor> added;
  if (bias) added = as_contiguous(*bias);
  const Tensor x = as_contiguous(input), weight = as_contiguous(packed);
  Tensor output = new_buffer(x, with_last_size(input, rows), x.scalar_type());
  if (rows == 0 || tokens == 0) return output;
  const DType dtype = checked_dtype(op, "input", x.scalar_type());
  run_forward(x, tokens, weight.const_data_ptr<uint8_t>(), rows, layout, dtype, nullptr,
              LinearOutput{output.mutable_data_ptr(), added ? added->const_data_ptr() : nullptr, rows, dtype});
  return output;
}

Tensor linear_backward_input(const Tensor& grad_output, const Tensor& packed, int64_t format, int64_t block_size,
                             int64_t in_features) {
  constexpr const char* op = "linear_backward_input";
  const RowLayout layout = checked_linear_backward(op, grad_output, packed, format, block_size, in_features);
  const int64_t rows = packed.size(0), tokens = leading_numel(grad_output);
  const NoGradGuard no_grad;
  const Tensor grad = as_contiguous(grad_output), weight = as_contiguous(packed);
  Tensor output = new_buffer(grad, with_last_size(grad_output, in_features), grad.scalar_type());
  if (tokens == 0) return output;
  if (rows == 0) return torch::stable::zero_(output);
  run_backward(grad, tokens, weight.const_data_ptr<uint8_t>(), rows, layout, checked_dtype(op, "grad_output", grad.scalar_type()),
               nullptr, nullptr, output.mutable_data_ptr());
  return output;
}

std::tuple<int64_t, int64_t> linear_memory(int64_t tokens, int64_t rows, int64_t format, int64_t block_size, int64_t in_features,
                                           ScalarType dtype) {
  constexpr const char* op = "linear_memory";
  const RowLayout layout = checked_plan(op, tokens, rows, 0, format, block_size, in_features);
  const DType checked = checked_dtype(op, "dtype", dtype);
  if (tokens == 0 || rows == 0) return {0, 0};
  return forward_memory(forward_sizes(tokens, rows, layout, checked)).both();
}

std::tuple<int64_t, int64_t> linear_backward_memory(int64_t tokens, int64_t rows, int64_t rank, int64_t format, int64_t block_size,
                                                    int64_t in_features, ScalarType dtype) {
  constexpr const char* op = "linear_backward_memory";
  const RowLayout layout = checked_plan(op, tokens, rows, rank, format, block_size, in_features);
  const DType checked = checked_dtype(op, "dtype", dtype);
  if (tokens == 0 || rows == 0) return {0, 0};
  return backward_memory(backward_sizes(tokens, rows, layout, checked), rank).both();
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) {
  halfbyte::impl_both(m, "linear", TORCH_BOX(&halfbyte::cpu::linear));
  halfbyte::impl_both(m, "linear_backward_input", TORCH_BOX(&halfbyte::cpu::linear_backward_input));
}

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CompositeExplicitAutograd, m) {
  m.impl("linear_memory", TORCH_BOX(&halfbyte::cpu::linear_memory));
  m.impl("linear_backward_memory", TORCH_BOX(&halfbyte::cpu::linear_backward_memory));
}
