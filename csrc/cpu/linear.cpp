// Fronts of linear and linear_backward_input on the CPU.
#include "dequantize.h"

namespace halfbyte::cpu {
namespace {

Tensor dense_weight(const Tensor& packed, const RowLayout& layout, ScalarType dtype) {
  const Tensor source = torch::stable::contiguous(packed);
  Tensor weight = torch::stable::new_empty(source, {packed.size(0), layout.in_features}, dtype);
  dequantize_into(source.const_data_ptr<uint8_t>(), packed.size(0), layout, checked_dtype("linear", "input", dtype),
                  weight.mutable_data_ptr(), false);
  return weight;
}

RowLayout checked_operands(const char* op, const char* name, const Tensor& t, const Tensor& packed, int64_t format,
                           int64_t block_size, int64_t in_features) {
  const RowLayout layout = checked_layout(op, format, block_size, in_features);
  checked_dtype(op, name, t.scalar_type());
  HALFBYTE_CHECK(t.dim() >= 1, op, name, " must have at least 1 dimension, got shape ", shape_text(t));
  check_same_device(op, name, t, "packed", packed);
  check_packed(op, packed, layout);
  HALFBYTE_CHECK(packed.dim() == 2, op, "packed must have 2 dimensions (out_features, row_bytes), got shape ", shape_text(packed));
  return layout;
}

Tensor linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t format,
              int64_t block_size, int64_t in_features) {
  constexpr const char* op = "linear";
  const RowLayout layout = checked_operands(op, "input", input, packed, format, block_size, in_features);
  HALFBYTE_CHECK(input.size(input.dim() - 1) == in_features, op, "input's last dimension must be in_features=", in_features,
                 ", got shape ", shape_text(input));
  if (bias) {
    HALFBYTE_CHECK(bias->scalar_type() == input.scalar_type(), op, "bias must have input's dtype ", dtype_name(input.scalar_type()),
                   ", got ", dtype_name(bias->scalar_type()));
    HALFBYTE_CHECK(bias->dim() == 1 && bias->size(0) == packed.size(0), op, "bias must have shape (", packed.size(0),
                   ",), got ", shape_text(*bias));
    check_same_device(op, "bias", *bias, "packed", packed);
  }
  return aten_linear(input, dense_weight(packed, layout, input.scalar_type()), bias);
}

Tensor linear_backward_input(const Tensor& grad_output, const Tensor& packed, int64_t format, int64_t block_size,
                             int64_t in_features) {
  constexpr const char* op = "linear_backward_input";
  const RowLayout layout = checked_operands(op, "grad_output", grad_output, packed, format, block_size, in_features);
  HALFBYTE_CHECK(grad_output.size(grad_output.dim() - 1) == packed.size(0), op, "grad_output's last dimension must be out_features=",
                 packed.size(0), ", got shape ", shape_text(grad_output));
  return aten_matmul(grad_output, dense_weight(packed, layout, grad_output.scalar_type()));
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) {
  m.impl("linear", TORCH_BOX(&halfbyte::cpu::linear));
  m.impl("linear_backward_input", TORCH_BOX(&halfbyte::cpu::linear_backward_input));
}
