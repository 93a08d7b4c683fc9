// Checks of the optimizer ops' arguments, the same for CPU and CUDA.
#pragma once

#include <optional>
#include <vector>

#include "bridge.h"
#include "checks.h"
#include "optimizer.h"

namespace halfbyte {

// The tensors of one call, by reference. second_codes and second_scales are null for rules with one moment.
struct OptimizerArguments {
  const char* op;
  const TensorList& params;
  const TensorList& grads;
  const TensorList& first_codes;
  const TensorList& first_scales;
  const TensorList* second_codes;
  const TensorList* second_scales;
  const TensorList& steps;
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
  if (count > 0) {
    const Tensor first = a.params.tensor(0);
    for (size_t i = 0; i < a.steps.size(); ++i) check_scalar(a.op, "steps", a.steps.tensor(i), first);
    if (a.lr_tensor) check_scalar(a.op, "lr_tensor", *a.lr_tensor, first);
    if (a.grad_scale) check_scalar(a.op, "grad_scale", *a.grad_scale, first);
    if (a.found_inf) check_scalar(a.op, "found_inf", *a.found_inf, first);
  }
  check_fraction(a.op, "beta1", h.beta1);
  check_fraction(a.op, "beta2", h.beta2);
  HALFBYTE_CHECK(h.eps >= 0.0, a.op, "eps must not be negative, got ", h.eps);
  HALFBYTE_CHECK(h.weight_decay >= 0.0, a.op, "weight_decay must not be negative, got ", h.weight_decay);
  HALFBYTE_CHECK(h.momentum >= 0.0, a.op, "momentum must not be negative, got ", h.momentum);
}

struct DeviceCode {
  int32_t type, index;
  bool is_cpu;
  explicit DeviceCode(AtenTensorHandle t) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t, &type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t, &index));
    is_cpu = type == aoti_torch_device_type_cpu();
  }
  bool operator==(const DeviceCode&) const = default;
};

// LibTorch's numbers of the dtypes that the lists may have.
struct DTypeCodes {
  const int32_t float32 = aoti_torch_dtype_float32(), bfloat16 = aoti_torch_dtype_bfloat16(),
                uint8 = aoti_torch_dtype_uint8();
};
inline const DTypeCodes kDTypeCodes;

// What the checks below ask of a tensor, read once: they run for 2688 of them in a step over 448 parameters, and each
// question is a call into LibTorch.
struct TensorFacts {
  void* data;
  const int64_t* sizes;
  int64_t dim;
  int32_t dtype;
  bool contiguous;

  explicit TensorFacts(AtenTensorHandle t) {
    int64_t* shape;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(t, &data));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t, &shape));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(t, &dim));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t, &dtype));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(t, &contiguous));
    sizes = shape;
  }
  bool same_shape(const TensorFacts& other) const {
    bool same = dim == other.dim;
    for (int64_t d = 0; same && d < dim; ++d) same = sizes[d] == other.sizes[d];
    return same;
  }
};

// Whether an entry of a list lies elsewhere than params[0]. Not asked on the CPU: with any other tensor in its lists the
// dispatcher calls that device's kernel.
inline bool on_other_device(const TensorList& list, size_t i, const DeviceCode& device) {
  return !device.is_cpu && DeviceCode(list[i]) != device;
}

inline void check_entry(const OptimizerArguments& a, const char* name, const TensorList& list, size_t i, const TensorFacts& facts,
                        const DeviceCode& device) {
  HALFBYTE_CHECK(facts.contiguous, a.op, name, "[", i, "] must be contiguous, got shape ", shape_text(list.tensor(i)),
                 " with other strides; a copy would be updated instead of it");
  if (on_other_device(list, i, device)) [[unlikely]]
    check_same_device(a.op, name, list.tensor(i), "params", a.params.tensor(0));
}

inline DType float_dtype(const char* op, const char* name, const TensorList& list, size_t i, const TensorFacts& facts) {
  if (facts.dtype == kDTypeCodes.float32) return DType::kFloat32;
  if (facts.dtype == kDTypeCodes.bfloat16) return DType::kBFloat16;
  return checked_dtype(op, name, list.tensor(i).scalar_type());
}

// One moment of params[i], an (N, ...) parameter of `rows` rows.
inline void fill_moment(const OptimizerArguments& a, size_t i, const TensorList& codes, const TensorList& scales,
                        const TensorFacts& param, int64_t rows, const DeviceCode& device, int moment, OptimizerTensor& out) {
  const TensorFacts code(codes[i]), scale(scales[i]);
  check_entry(a, "codes", codes, i, code, device);
  check_entry(a, "scales", scales, i, scale, device);
  HALFBYTE_CHECK(code.dtype == kDTypeCodes.uint8, a.op, "codes[", i, "] must be uint8, got ", dtype_name(codes.tensor(i).scalar_type()));
  HALFBYTE_CHECK(code.same_shape(param), a.op, "codes[", i, "] must have params[", i, "]'s shape ",
                 shape_text(a.params.tensor(i)), ", got ", shape_text(codes.tensor(i)));
  HALFBYTE_CHECK(scale.dtype == kDTypeCodes.float32, a.op, "scales[", i, "] must be float32, got ",
                 dtype_name(scales.tensor(i).scalar_type()));
  HALFBYTE_CHECK(scale.dim == 2 && scale.sizes[0] == rows && scale.sizes[1] == out.blocks_per_row, a.op, "scales[", i,
                 "] must have shape (", rows, ", ", out.blocks_per_row, ") for a parameter of shape ",
                 shape_text(a.params.tensor(i)), ", got ", shape_text(scales.tensor(i)));
  out.codes[moment] = static_cast<uint8_t*>(code.data);
  out.scales[moment] = static_cast<float*>(scale.data);
}

// Checks entry i of the lists, writes it to `out` and returns its number of rows.
inline int64_t fill_optimizer_tensor(const OptimizerArguments& a, size_t i, const DeviceCode& device, OptimizerTensor& out) {
  const TensorFacts param(a.params[i]), grad(a.grads[i]);
  out.param_dtype = float_dtype(a.op, "params", a.params, i, param);
  out.grad_dtype = float_dtype(a.op, "grads", a.grads, i, grad);
  check_entry(a, "params", a.params, i, param, device);
  check_entry(a, "grads", a.grads, i, grad, device);
  HALFBYTE_CHECK(grad.same_shape(param), a.op, "grads[", i, "] must have params[", i, "]'s shape ",
                 shape_text(a.params.tensor(i)), ", got ", shape_text(a.grads.tensor(i)));
  HALFBYTE_CHECK(param.dim >= 1, a.op, "params[", i, "] must have at least 1 dimension");
  const int64_t rows = param.dim == 1 ? 1 : param.sizes[0];
  int64_t length = param.dim == 1 ? param.sizes[0] : 1;
  for (int64_t d = 1; d < param.dim; ++d) length *= param.sizes[d];
  out.row_length = length;
  out.blocks_per_row = (length + kStateBlock - 1) / kStateBlock;
  out.element_offset = a.element_offsets.empty() ? 0 : uint64_t(a.element_offsets[i]);
  out.param = param.data;
  out.grad = grad.data;
  fill_moment(a, i, a.first_codes, a.first_scales, param, rows, device, 0, out);
  if (a.second_codes) fill_moment(a, i, *a.second_codes, *a.second_scales, param, rows, device, 1, out);
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
