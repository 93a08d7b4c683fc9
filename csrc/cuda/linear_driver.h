// What the fronts of linear and lora_linear share on CUDA.
//
// linear_route.h chooses: a kernel multiplies packed rows as they are, up to kWgmmaLargeM or kTiledM rows of input (kBackwardWgmmaM or
// kBackwardM in backward); otherwise the weight is decoded by one launch into a buffer of torch's caching allocator and multiplied
// by aten. The buffer lives for the call only: a workspace kept between calls would be written by one stream while another still
// reads it, and would dangle in a captured graph.
#pragma once

#include <cstdlib>
#include <string_view>

#include "../operands.h"
#include "geometry.h"
#include "kernels.h"
#include "linear_route.h"
#include "stream.h"

namespace halfbyte::cuda {

inline Tensor dense_weight(const char* op, const Tensor& packed, const RowLayout& layout, ScalarType dtype) {
  const LaunchScope scope(op, packed);
  const Tensor source = as_contiguous(packed);
  Tensor weight = new_tensor(source, {packed.size(0), layout.in_features}, dtype);
  scope.check(launch_dequantize(source.const_data_ptr<uint8_t>(), packed.size(0), layout, checked_dtype(op, "input", dtype),
                                weight.mutable_data_ptr(), scope.stream()));
  return weight;
}

// The route that an environment variable names, if any: gpu_check.py times each beside the others.
constexpr const char kForward[] = "HALFBYTE_CUDA_LINEAR", kBackward[] = "HALFBYTE_CUDA_LINEAR_BACKWARD";
inline std::optional<LinearRoute> forced_route(const char* op, const char* variable) {
  const char* wanted = std::getenv(variable);
  if (!wanted || !*wanted) return std::nullopt;
  for (int32_t i = 0; i < int32_t(std::size(kRouteNames)); ++i) {
    if (std::string_view(wanted) == kRouteNames[i]) return LinearRoute(i);
  }
  fail(op, variable, " must be small, tiled, wgmma or dense, got ", wanted);
}

// What linear_route.h decides on; input, (M, K) or in backward (M, N), and packed are contiguous, and their device is current.
inline LinearProblem problem_of(const Tensor& input, const Tensor& packed, const RowLayout& layout) {
  LinearProblem p{};
  p.M = input.size(0);
  p.N = packed.size(0);
  p.K = layout.in_features;
  p.format = layout.format;
  p.block_size = layout.block_size;
  p.dtype = checked_dtype("linear", "input", input.scalar_type());
  p.input_width = access_width(input.const_data_ptr(), input.size(1) * int64_t(input.element_size()));
  p.packed_width = access_width(packed.const_data_ptr(), layout.row_bytes);
  return p;
}

// A kernel on packed rows; launch is null where none takes the problem.
struct PackedKernel {
  int64_t (*splits)(int64_t N, int64_t K);
  cudaError_t (*launch)(const PackedProduct&, cudaStream_t);
};
inline PackedKernel linear_kernel(const LinearProblem& p) {
  switch (route(p)) {
    case LinearRoute::kSmall: return {linear_small_splits, launch_linear_small};
    case LinearRoute::kTiled: return {linear_tiled_splits, launch_linear_tiled};
    case LinearRoute::kWgmma: return {linear_wgmma_splits, launch_linear_wgmma};
    case LinearRoute::kDense: break;
  }
  return {};
}
inline PackedKernel backward_kernel(const LinearProblem& p) {
  switch (backward_route(p)) {
    case LinearRoute::kSmall: return {linear_backward_small_splits, launch_linear_backward};
    case LinearRoute::kTiled: return {linear_backward_tiled_splits, launch_linear_backward};
    case LinearRoute::kWgmma: return {linear_backward_wgmma_splits, launch_linear_backward_wgmma};
    case LinearRoute::kDense: break;
  }
  return {};
}

// output (M, columns) = the product of input's contiguous rows plus addend, (columns,) or output itself, by the kernel that `choose`
// gives for it; false where it gives none. `most`: the largest M for which it gives one that $`variable` does not force.
inline bool packed_product(const char* op, PackedKernel (*choose)(const LinearProblem&), int64_t most, const char* variable,
                           const Tensor& input, const Tensor& packed, const std::optional<Tensor>& addend, const RowLayout& layout,
                           const Tensor& output) {
  const std::optional<LinearRoute> forced = forced_route(op, variable);
  if (input.size(0) > most && !forced) return false;
  const NoGradGuard no_grad;
  const Tensor w = as_contiguous(packed);
  const LaunchScope scope(op, w);
  LinearProblem p = problem_of(input, w, layout);
  p.forced = forced;
  p.wgmma = (p.M > kSmallM || forced) && linear_wgmma_available();  // asks the device
  const PackedKernel kernel = choose(p);
  HALFBYTE_CHECK(kernel.launch || !forced || forced == LinearRoute::kDense, op, variable, "=", kRouteNames[int(*forced)],
                 " asks for a kernel that does not take this problem (csrc/cuda/linear_route.h)");
  if (!kernel.launch) return false;
  const int64_t columns = output.size(1);
  const Tensor added = as_contiguous(addend ? *addend : input);  // input only stands for none
  const int64_t splits = kernel.splits(p.N, p.K);
  const Tensor partial = splits > 1 ? new_tensor(input, {splits, p.M, columns}, ScalarType::Float) : output;
  PackedProduct product{};
  product.input = input.const_data_ptr();
  product.packed = w.const_data_ptr<uint8_t>();
  product.M = p.M;
  product.N = p.N;
  product.layout = layout;
  product.dtype = p.dtype;
  product.addend = addend ? added.const_data_ptr() : nullptr;
  product.addend_stride = addend && added.dim() == 2 ? columns : 0;
  product.output = output.mutable_data_ptr();
  product.partial = splits > 1 ? partial.mutable_data_ptr<float>() : nullptr;
  product.splits = splits;
  scope.check(kernel.launch(product, scope.stream()));
  return true;
}

// output (M, N) = input (M, K) @ packed^T + addend, (N,) or output itself: what the product's own accumulation starts from.
inline void linear_into(const char* op, const Tensor& input, const Tensor& packed, const std::optional<Tensor>& addend,
                        const RowLayout& layout, const Tensor& output) {
  if (packed_product(op, linear_kernel, kWgmmaLargeM, kForward, input, packed, addend, layout, output)) return;
  const Tensor weight = dense_weight(op, packed, layout, input.scalar_type());
  addmm_out(op, output, addend ? *addend : output, input, transposed(weight), addend ? 1 : 0, 1);
}

// output (M, K) = grad_output (M, N) @ packed + addend, output itself.
inline void backward_into(const char* op, const Tensor& grad_output, const Tensor& packed, const std::optional<Tensor>& addend,
                          const RowLayout& layout, const Tensor& output) {
  if (packed_product(op, backward_kernel, kBackwardWgmmaM, kBackward, grad_output, packed, addend, layout, output)) return;
  const Tensor weight = dense_weight(op, packed, layout, grad_output.scalar_type());
  addmm_out(op, output, addend ? *addend : output, grad_output, weight, addend ? 1 : 0, 1);
}

// t (..., K), contiguous, as (M, K).
inline Tensor matrix_of(const Tensor& t) {
  const int64_t columns = t.size(t.dim() - 1);
  return matrix_in(t, leading_numel(t), columns, columns);
}

}  // namespace halfbyte::cuda
