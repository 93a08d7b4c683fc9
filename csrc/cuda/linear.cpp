// Fronts of linear and linear_backward_input on CUDA: the weight is decoded by one launch into a buffer of torch's caching
// allocator and multiplied by aten. The buffer lives for the call only: a workspace kept between calls would be written by
// one stream while another still reads it, and would dangle in a captured graph.
#include "../operands.h"
#include "kernels.h"
#include "stream.h"

namespace halfbyte::cuda {
namespace {

Tensor dense_weight(const char* op, const Tensor& packed, const RowLayout& layout, ScalarType dtype) {
  const LaunchScope scope(op, packed);
  const Tensor source = torch::stable::contiguous(packed);
  Tensor weight = torch::stable::new_empty(source, {packed.size(0), layout.in_features}, dtype);
  scope.check(launch_dequantize(source.const_data_ptr<uint8_t>(), packed.size(0), layout, checked_dtype(op, "input", dtype),
                                weight.mutable_data_ptr(), scope.stream()));
  return weight;
}

Tensor linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t format,
              int64_t block_size, int64_t in_features) {
  constexpr const char* op = "linear";
  const RowLayout layout = checked_linear(op, input, packed, bias, format, block_size, in_features);
  return aten_linear(input, dense_weight(op, packed, layout, input.scalar_type()), bias);
}

Tensor linear_backward_input(const Tensor& grad_output, const Tensor& packed, int64_t format, int64_t block_size,
                             int64_t in_features) {
  constexpr const char* op = "linear_backward_input";
  const RowLayout layout = checked_linear_backward(op, grad_output, packed, format, block_size, in_features);
  return aten_matmul(grad_output, dense_weight(op, packed, layout, grad_output.scalar_type()));
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) {
  m.impl("linear", TORCH_BOX(&halfbyte::cuda::linear));
  m.impl("linear_backward_input", TORCH_BOX(&halfbyte::cuda::linear_backward_input));
}
