// Fronts of linear and linear_backward_input on CUDA.
#include "linear_driver.h"

namespace halfbyte::cuda {
namespace {

Tensor linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t format,
              int64_t block_size, int64_t in_features) {
  constexpr const char* op = "linear";
  const RowLayout layout = checked_linear(op, input, packed, bias, format, block_size, in_features);
  const LaunchScope scope(op, packed);
  const Tensor x = as_contiguous(input), output = new_tensor(x, with_last_size(x, packed.size(0)), x.scalar_type());
  linear_into(op, matrix_of(x), packed, bias, layout, matrix_of(output));
  return output;
}

Tensor linear_backward_input(const Tensor& grad_output, const Tensor& packed, int64_t format, int64_t block_size,
                             int64_t in_features) {
  constexpr const char* op = "linear_backward_input";
  const RowLayout layout = checked_linear_backward(op, grad_output, packed, format, block_size, in_features);
  const LaunchScope scope(op, packed);
  const Tensor grad = as_contiguous(grad_output), output = new_tensor(grad, with_last_size(grad, in_features), grad.scalar_type());
  backward_into(op, matrix_of(grad), packed, std::nullopt, layout, matrix_of(output));
  return output;
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) {
  halfbyte::impl_both(m, "linear", TORCH_BOX(&halfbyte::cuda::linear));
  halfbyte::impl_both(m, "linear_backward_input", TORCH_BOX(&halfbyte::cuda::linear_backward_input));
}
