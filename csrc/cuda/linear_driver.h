// What the fronts of linear and lora_linear share on CUDA.
//
// linear_route.h chooses: small batches read the packed rows directly; otherwise the weight is decoded by one launch into a
// buffer of torch's caching allocator and multiplied by aten. The buffer lives for the call only: a workspace kept between
// calls would be written by one stream while another still reads it, and would dangle in a captured graph.
#pragma once

#include "../operands.h"
#include "geometry.h"
#include "kernels.h"
#include "linear_route.h"
#include "stream.h"

namespace halfbyte::cuda {

inline Tensor dense_weight(const char* op, const Tensor& packed, const RowLayout& layout, ScalarType dtype) {
  const LaunchScope scope(op, packed);
  const Tensor source = torch::stable::contiguous(packed);
  Tensor weight = torch::stable::new_empty(source, {packed.size(0), layout.in_features}, dtype);
  scope.check(launch_dequantize(source.const_data_ptr<uint8_t>(), packed.size(0), layout, checked_dtype(op, "input", dtype),
                                weight.mutable_data_ptr(), scope.stream()));
  return weight;
}

// What linear_route.h decides on; input (grad_output in backward) and packed are contiguous.
inline LinearProblem problem_of(const Tensor& input, const Tensor& packed, const RowLayout& layout) {
  LinearProblem p{};
  p.M = leading_numel(input);
  p.N = packed.size(0);
  p.K = layout.in_features;
  p.format = layout.format;
  p.block_size = layout.block_size;
  p.dtype = checked_dtype("linear", "input", input.scalar_type());
  p.input_width = access_width(input.const_data_ptr(), input.size(input.dim() - 1) * int64_t(input.element_size()));
  p.packed_width = access_width(packed.const_data_ptr(), layout.row_bytes);
  return p;
}

// The small kernel's product plus addend, (N,) or (M, N).
inline Tensor small_linear(const char* op, const LinearProblem& p, const Tensor& input, const Tensor& packed,
                           const std::optional<Tensor>& addend, const RowLayout& layout) {
  const LaunchScope scope(op, packed);
  const Tensor b = torch::stable::contiguous(addend ? *addend : input);  // input only stands for none
  Tensor output = torch::stable::new_empty(input, with_last_size(input, p.N), input.scalar_type());
  const int64_t splits = linear_small_splits(layout, p.N);
  Tensor partial = splits > 1 ? torch::stable::new_empty(input, {splits, p.M, p.N}, ScalarType::Float) : output;
  scope.check(launch_linear_small(input.const_data_ptr(), p.M, packed.const_data_ptr<uint8_t>(), p.N, layout, p.dtype,
                                  addend ? b.const_data_ptr() : nullptr, b.dim() == 2 ? p.N : 0, output.mutable_data_ptr(),
                                  splits > 1 ? partial.mutable_data_ptr<float>() : nullptr, splits, scope.stream()));
  return output;
}

// input (..., K) @ packed^T + addend; addend: (N,), or (M, N) where input has two dimensions. aten::linear hands a 2-D one to
// addmm: it is what the product's own accumulation starts from.
inline Tensor run_linear(const char* op, const Tensor& input, const Tensor& packed, const std::optional<Tensor>& addend,
                         const RowLayout& layout) {
  if (leading_numel(input) <= kSmallM) {
    const NoGradGuard no_grad;
    const Tensor x = torch::stable::contiguous(input), w = torch::stable::contiguous(packed);
    const LinearProblem problem = problem_of(x, w, layout);
    if (route(problem) == LinearRoute::kSmall) return small_linear(op, problem, x, w, addend, layout);
  }
  return aten_linear(input, dense_weight(op, packed, layout, input.scalar_type()), addend);
}

// grad_output (..., N) @ packed + addend (M, K), which goes with a grad_output of two dimensions.
inline Tensor run_backward(const char* op, const Tensor& grad_output, const Tensor& packed, const std::optional<Tensor>& addend,
                           const RowLayout& layout) {
  const NoGradGuard no_grad;
  if (leading_numel(grad_output) <= kSmallM) {
    const Tensor grad = torch::stable::contiguous(grad_output), w = torch::stable::contiguous(packed);
    const LinearProblem p = problem_of(grad, w, layout);
    if (backward_route(p) == LinearRoute::kSmall) {
      const LaunchScope scope(op, w);
      const Tensor added = torch::stable::contiguous(addend ? *addend : grad);  // grad only stands for none
      Tensor output = torch::stable::new_empty(grad, with_last_size(grad, p.K), grad.scalar_type());
      const int64_t splits = linear_backward_small_splits(layout, p.N);
      Tensor partial = splits > 1 ? torch::stable::new_empty(grad, {splits, p.M, p.K}, ScalarType::Float) : output;
      scope.check(launch_linear_backward_small(grad.const_data_ptr(), p.M, w.const_data_ptr<uint8_t>(), p.N, layout, p.dtype,
                                               addend ? added.const_data_ptr() : nullptr, output.mutable_data_ptr(),
                                               splits > 1 ? partial.mutable_data_ptr<float>() : nullptr, splits, scope.stream()));
      return output;
    }
  }
  Tensor weight = dense_weight(op, packed, layout, grad_output.scalar_type());
  if (!addend) return aten_matmul(grad_output, weight);
  return aten_linear(grad_output, torch::stable::transpose(weight, 0, 1), addend);
}

}  // namespace halfbyte::cuda
