// Fronts of linear and linear_backward_input on CUDA.
#include "linear_driver.h"

namespace halfbyte::cuda {
namespace {

Tensor linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t format,
              int64_t block_size, int64_t in_features) {
  constexpr const char* op = "linear";
  const RowLayout layout = checked_linear(op, input, packed, bias, format, block_size, in_features);
  return run_linear(op, input, packed, bias, layout);
}

Tensor linear_backward_input(const Tensor& grad_output, const Tensor& packed, int64_t format, int64_t block_size,
                             int64_t in_features) {
  constexpr const char* op = "linear_backward_input";
  const RowLayout layout = checked_linear_backward(op, grad_output, packed, format, block_size, in_features);
  return run_backward(op, grad_output, packed, std::nullopt, layout);
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) {
  m.impl("linear", TORCH_BOX(&halfbyte::cuda::linear));
  m.impl("linear_backward_input", TORCH_BOX(&halfbyte::cuda::linear_backward_input));
}
