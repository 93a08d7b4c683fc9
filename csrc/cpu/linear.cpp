// Fronts of linear and linear_backward_input on the CPU: check, prepare the activations once, split the output over threads.
//
// bf16 inputs multiply in bf16 pairs where the CPU has them (weights rounded to bf16, as in a dense bf16 layer); everything
// else, fp16 and bf16 on older CPUs included, multiplies exact fp32 weights. Sums are fp32, in an order that depends
// neither on the number of threads nor on how the work is split.
#include <algorithm>

#include "../bridge.h"
#include "../checks.h"
#include "isa.h"
#include "workspace.h"

namespace halfbyte::cpu {
namespace {

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

Compute compute_for(DType dtype, const LinearKernels& table) {
  return dtype == DType::kBFloat16 && table.has_bfloat16 ? Compute::kBFloat16 : Compute::kFloat32;
}

// Bytes for `elements` in units of `compute`.
Tensor unit_buffer(const Tensor& like, int64_t elements, Compute compute) {
  return torch::stable::new_empty(like, {elements * (compute == Compute::kFloat32 ? 4 : 2)}, ScalarType::Byte);
}

const char* at_row(const Tensor& t, int64_t row, int64_t row_elements) {
  return static_cast<const char*>(t.const_data_ptr()) + row * row_elements * int64_t(t.element_size());
}

// Rows a thread should get at least: dividing less work costs more than it gains.
int64_t row_grain(int64_t work_per_row) { return 1 + (int64_t(1) << 16) / std::max<int64_t>(work_per_row, 1); }

void forward_direct(const Tensor& x, int64_t tokens, const uint8_t* packed, int64_t rows, const RowLayout& layout, DType dtype,
                    Compute compute, const LinearOutput& output) {
  const LinearKernels& table = kernels().linear;
  Tensor units = unit_buffer(x, tokens * round_up(layout.in_features, table.group), compute);
  table.prepare_direct(x.const_data_ptr(), dtype, tokens, layout, compute, units.mutable_data_ptr());
  const void* prepared = units.const_data_ptr();
  parallel_rows(rows, row_grain(layout.in_features), [&](int64_t begin, int64_t end) {
    table.direct(packed, begin, end, layout, compute, prepared, tokens, output);
  });
}

void forward_tiled(const Tensor& x, int64_t tokens, const uint8_t* packed, int64_t rows, const RowLayout& layout, DType dtype,
                   Compute compute, const LinearOutput& whole) {
  LinearOutput output = whole;
  constexpr int64_t kRowUnit = 12;  // rows of one micro-kernel: no thread gets a part of them
  const LinearKernels& table = kernels().linear;
  const int64_t K = layout.in_features, padded = round_up(K, table.group);
  Tensor units = unit_buffer(x, round_up(std::min(tokens, kLinearTokens), table.tile_tokens) * padded, compute);
  void* prepared = units.mutable_data_ptr();
  const int64_t output_row = output.stride * (dtype == DType::kFloat32 ? 4 : 2);
  for (int64_t m = 0; m < tokens; m += kLinearTokens) {
    const int64_t count = std::min(tokens - m, kLinearTokens);
    const char* source = at_row(x, m, K);
    const int64_t tiles = (count + table.tile_tokens - 1) / table.tile_tokens;
    parallel_rows(tiles, row_grain(K * table.tile_tokens), [&](int64_t begin, int64_t end) {
      table.prepare_tiled(source, dtype, count, layout, compute, begin, end, prepared);
    });
    parallel_rows((rows + kRowUnit - 1) / kRowUnit, row_grain(K * count), [&](int64_t begin, int64_t end) {
      const WorkspaceLease scratch(table.scratch_bytes);
      table.tiled(packed, begin * kRowUnit, std::min(end * kRowUnit, rows), layout, compute, prepared, count, output, scratch.data());
    });
    output.data = static_cast<char*>(output.data) + output_row * count;
  }
}

Tensor linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t format,
              int64_t block_size, int64_t in_features) {
  constexpr const char* op = "linear";
  const RowLayout layout = checked_operands(op, "input", input, packed, format, block_size, in_features);
  HALFBYTE_CHECK(input.size(input.dim() - 1) == in_features, op, "input's last dimension must be in_features=", in_features,
                 ", got shape ", shape_text(input));
  const int64_t rows = packed.size(0), tokens = leading_numel(input);
  const NoGradGuard no_grad;
  std::optional<Tensor> added;
  if (bias) {
    HALFBYTE_CHECK(bias->scalar_type() == input.scalar_type(), op, "bias must have input's dtype ", dtype_name(input.scalar_type()),
                   ", got ", dtype_name(bias->scalar_type()));
    HALFBYTE_CHECK(bias->dim() == 1 && bias->size(0) == rows, op, "bias must have shape (", rows, ",), got ", shape_text(*bias));
    check_same_device(op, "bias", *bias, "packed", packed);
    added = torch::stable::contiguous(*bias);
  }
  const Tensor x = torch::stable::contiguous(input), weight = torch::stable::contiguous(packed);
  Tensor output = torch::stable::new_empty(x, with_last_size(input, rows), x.scalar_type());
  if (rows == 0 || tokens == 0) return output;
  const DType dtype = checked_dtype(op, "input", x.scalar_type());
  const LinearKernels& table = kernels().linear;
  const Compute compute = compute_for(dtype, table);
  const LinearOutput target{output.mutable_data_ptr(), added ? added->const_data_ptr() : nullptr, rows, dtype};
  const auto forward = tokens <= table.direct_tokens[int(compute)] ? forward_direct : forward_tiled;
  forward(x, tokens, weight.const_data_ptr<uint8_t>(), rows, layout, dtype, compute, target);
  return output;
}

Tensor linear_backward_input(const Tensor& grad_output, const Tensor& packed, int64_t format, int64_t block_size,
                             int64_t in_features) {
  constexpr const char* op = "linear_backward_input";
  const RowLayout layout = checked_operands(op, "grad_output", grad_output, packed, format, block_size, in_features);
  const int64_t rows = packed.size(0), tokens = leading_numel(grad_output);
  HALFBYTE_CHECK(grad_output.size(grad_output.dim() - 1) == rows, op, "grad_output's last dimension must be out_features=", rows,
                 ", got shape ", shape_text(grad_output));
  const NoGradGuard no_grad;
  const Tensor grad = torch::stable::contiguous(grad_output), weight = torch::stable::contiguous(packed);
  Tensor output = torch::stable::new_empty(grad, with_last_size(grad_output, in_features), grad.scalar_type());
  if (tokens == 0) return output;
  if (rows == 0) return torch::stable::zero_(output);
  const DType dtype = checked_dtype(op, "grad_output", grad.scalar_type());
  const LinearKernels& table = kernels().linear;
  const Compute compute = compute_for(dtype, table);
  // Gradients are broadcast unit by unit: floats, or pairs of bf16, can be read where they are.
  const int64_t unit_elements = compute == Compute::kFloat32 ? 1 : 2;
  const int64_t grad_stride = (rows + unit_elements - 1) / unit_elements;
  std::optional<Tensor> units;
  if (dtype != DType::kFloat32 && (compute == Compute::kFloat32 || rows % 2 != 0)) {
    units = unit_buffer(grad, tokens * grad_stride * unit_elements, compute);
    auto* converted = static_cast<char*>(units->mutable_data_ptr());
    parallel_rows(tokens, row_grain(rows), [&](int64_t begin, int64_t end) {
      table.prepare_grad(at_row(grad, begin, rows), dtype, end - begin, rows, compute, converted + begin * grad_stride * 4);
    });
  }
  const auto* source = static_cast<const char*>(units ? units->const_data_ptr() : grad.const_data_ptr());
  const int64_t blocks = (tokens + kLinearTokens - 1) / kLinearTokens;
  const int64_t groups = (in_features + table.group - 1) / table.group;
  const int64_t output_row = in_features * int64_t(output.element_size());
  auto* target = static_cast<char*>(output.mutable_data_ptr());
  parallel_rows(blocks * groups, row_grain(rows * table.group * std::min(tokens, kLinearTokens)), [&](int64_t begin, int64_t end) {
    const WorkspaceLease scratch(table.scratch_bytes);
    for (int64_t at = begin; at < end;) {
      const int64_t block = at / groups, group = at % groups, token = block * kLinearTokens;
      const int64_t group_end = std::min(groups, group + end - at);
      table.backward(weight.const_data_ptr<uint8_t>(), rows, group, group_end, layout, compute, source + token * grad_stride * 4,
                     grad_stride, std::min(tokens - token, kLinearTokens),
                     LinearOutput{target + token * output_row, nullptr, in_features, dtype}, scratch.data());
      at += group_end - group;
    }
  });
  return output;
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) {
  m.impl("linear", TORCH_BOX(&halfbyte::cpu::linear));
  m.impl("linear_backward_input", TORCH_BOX(&halfbyte::cpu::linear_backward_input));
}
