// Checks of the optimizer ops' arguments, the same for CPU and CUDA.
#pragma once

#include <optional>
#include <vector>

#include "checks.h"
#include "optimizer.h"

namespace halfbyte {

// The tensors of one call, by reference. second_codes and second_scales are null for rules with one moment.
struct OptimizerArguments {
  const char* op;
  const std::vector<Tensor>& params;
  const std::vector<Tensor>& grads;
  const std::vector<Tensor>& first_codes;
  const std::vector<Tensor>& first_scales;
  const std::vector<Tensor>* second_codes;
  const std::vector<Tensor>* second_scales;
  const std::vector<Tensor>& steps;
  const std::optional<Tensor>& lr_tensor;
  const std::optional<Tensor>& grad_scale;
  const std::optional<Tensor>& found_inf;
  const std::vector<int64_t>& element_offsets;
};

inline void check_scalar(const char* op, const char* name, const Tensor& t, const Tensor& like) {
  HALFBYTE_CHECK(t.scalar_type() == ScalarType::Float && t.numel() == 1, op, name, " must be one float32, got ",
                 dtype_name(t.scalar_type()), " of shape ", shape_text(t));
  check_same_device(op, name, t, "params", like);
}

inline void check_length(const char* op, const char* name, size_t got, size_t expected) {
  HALFBYTE_CHECK(got == expected, op, name, " must have one entry per parameter, ", expected, ", got ", got);
}

inline void check_fraction(const char* op, const char* name, double value) {
  HALFBYTE_CHECK(value >= 0.0 && value < 1.0, op, name, " must be from 0 to below 1, got ", value);
}

// Everything but the tensors of the lists themselves, which fill_optimizer_tensor checks.
inline void check_optimizer_arguments(const OptimizerArguments& a, const OptimizerHyper& h) {
  const size_t count = a.params.size();
  check_length(a.op, "grads", a.grads.size(), count);
  check_length(a.op, "codes of the first moment", a.first_codes.size(), count);
  check_length(a.op, "scales of the first moment", a.first_scales.size(), count);
  if (a.second_codes) check_length(a.op, "codes of the second moment", a.second_codes->size(), count);
  if (a.second_scales) check_length(a.op, "scales of the second moment", a.second_scales->size(), count);
  HALFBYTE_CHECK(a.steps.size() == count || (a.steps.size() == 1 && count > 0), a.op,
                 "steps must have one entry for all parameters or one per parameter, ", count, ", got ", a.steps.size());
  HALFBYTE_CHECK(a.element_offsets.empty() || a.element_offsets.size() == count, a.op,
                 "element_offsets must be empty or have one entry per parameter, ", count, ", got ", a.element_offsets.size());
  for (const Tensor& step : a.steps) check_scalar(a.op, "steps", step, a.params[0]);
  if (count > 0 && a.lr_tensor) check_scalar(a.op, "lr_tensor", *a.lr_tensor, a.params[0]);
  if (count > 0 && a.grad_scale) check_scalar(a.op, "grad_scale", *a.grad_scale, a.params[0]);
  if (count > 0 && a.found_inf) check_scalar(a.op, "found_inf", *a.found_inf, a.params[0]);
  check_fraction(a.op, "beta1", h.beta1);
  check_fraction(a.op, "beta2", h.beta2);
  HALFBYTE_CHECK(h.eps >= 0.0, a.op, "eps must not be negative, got ", h.eps);
  HALFBYTE_CHECK(h.weight_decay >= 0.0, a.op, "weight_decay must not be negative, got ", h.weight_decay);
  HALFBYTE_CHECK(h.momentum >= 0.0, a.op, "momentum must not be negative, got ", h.momentum);
}

// The checks below run for every tensor of every list: 2000 of them for 448 parameters. Hence one device for all, compared
// as numbers, and untyped pointers (the typed ones ask for the dtype again).
struct DeviceCode {
  int32_t type, index;
  explicit DeviceCode(const Tensor& t) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &index));
  }
  bool operator==(const DeviceCode&) const = default;
};

inline void check_list_tensor(const OptimizerArguments& a, const char* name, size_t i, const Tensor& t, const DeviceCode& device) {
  HALFBYTE_CHECK(t.is_contiguous(), a.op, name, "[", i, "] must be contiguous, got shape ", shape_text(t),
                 " with other strides; a copy would be updated instead of it");
  if (DeviceCode(t) != device) [[unlikely]] check_same_device(a.op, name, t, "params", a.params[0]);
}

inline void check_state(const OptimizerArguments& a, size_t i, const Tensor& codes, const Tensor& scales, int64_t rows,
                        int64_t blocks_per_row, const DeviceCode& device) {
  const Tensor& param = a.params[i];
  check_list_tensor(a, "codes", i, codes, device);
  check_list_tensor(a, "scales", i, scales, device);
  HALFBYTE_CHECK(codes.scalar_type() == ScalarType::Byte, a.op, "codes[", i, "] must be uint8, got ", dtype_name(codes.scalar_type()));
  HALFBYTE_CHECK(codes.sizes() == param.sizes(), a.op, "codes[", i, "] must have params[", i, "]'s shape ", shape_text(param),
                 ", got ", shape_text(codes));
  HALFBYTE_CHECK(scales.scalar_type() == ScalarType::Float, a.op, "scales[", i, "] must be float32, got ",
                 dtype_name(scales.scalar_type()));
  const auto sizes = scales.sizes();
  HALFBYTE_CHECK(sizes.size() == 2 && sizes[0] == rows && sizes[1] == blocks_per_row, a.op, "scales[", i,
                 "] must have shape (", rows, ", ", blocks_per_row, ") for a parameter of shape ", shape_text(param), ", got ",
                 shape_text(scales));
}

// Checks entry i of the lists, writes it to `out` and returns its number of rows.
inline int64_t fill_optimizer_tensor(const OptimizerArguments& a, size_t i, const DeviceCode& device, OptimizerTensor& out) {
  const Tensor& param = a.params[i];
  const Tensor& grad = a.grads[i];
  out.param_dtype = checked_dtype(a.op, "params", param.scalar_type());
  out.grad_dtype = checked_dtype(a.op, "grads", grad.scalar_type());
  check_list_tensor(a, "params", i, param, device);
  check_list_tensor(a, "grads", i, grad, device);
  const auto sizes = param.sizes();
  HALFBYTE_CHECK(grad.sizes() == sizes, a.op, "grads[", i, "] must have params[", i, "]'s shape ", shape_text(param),
                 ", got ", shape_text(grad));
  HALFBYTE_CHECK(sizes.size() >= 1, a.op, "params[", i, "] must have at least 1 dimension");
  const int64_t rows = sizes.size() == 1 ? 1 : sizes[0];
  int64_t length = sizes.size() == 1 ? sizes[0] : 1;
  for (size_t d = 1; d < sizes.size(); ++d) length *= sizes[d];
  out.row_length = length;
  out.blocks_per_row = (length + kStateBlock - 1) / kStateBlock;
  out.element_offset = a.element_offsets.empty() ? 0 : uint64_t(a.element_offsets[i]);
  check_state(a, i, a.first_codes[i], a.first_scales[i], rows, out.blocks_per_row, device);
  out.param = param.mutable_data_ptr();
  out.grad = grad.const_data_ptr();
  out.codes[0] = static_cast<uint8_t*>(a.first_codes[i].mutable_data_ptr());
  out.scales[0] = static_cast<float*>(a.first_scales[i].mutable_data_ptr());
  if (a.second_codes) {
    check_state(a, i, (*a.second_codes)[i], (*a.second_scales)[i], rows, out.blocks_per_row, device);
    out.codes[1] = static_cast<uint8_t*>((*a.second_codes)[i].mutable_data_ptr());
    out.scales[1] = static_cast<float*>((*a.second_scales)[i].mutable_data_ptr());
  }
  return rows;
}

// All entries of the lists, checked. Nothing is written before every one of them has been.
struct OptimizerTensors {
  std::vector<OptimizerTensor> tensors;
  std::vector<int64_t> rows;  // of each

  explicit OptimizerTensors(const OptimizerArguments& a) : tensors(a.params.size()), rows(a.params.size()) {
    if (tensors.empty()) return;
    const DeviceCode device(a.params[0]);
    for (size_t i = 0; i < tensors.size(); ++i) rows[i] = fill_optimizer_tensor(a, i, device, tensors[i]);
  }
};

}  // namespace halfbyte
