// Front of error_feedback on CUDA: check, allocate, one launch.
#include "../feedback_operands.h"
#include "kernels.h"
#include "stream.h"

namespace halfbyte::cuda {
namespace {

std::tuple<Tensor, Tensor> error_feedback(const Tensor& weight, const std::optional<Tensor>& factor, const Tensor& importance,
                                          const std::optional<Tensor>& scales, const Tensor& candidates, int64_t format,
                                          int64_t block_size) {
  const LaunchScope scope("error_feedback", weight);
  const FeedbackOperands o = checked_feedback(weight, factor, importance, scales, candidates, format, block_size);
  Tensor targets = torch::stable::new_empty(o.weight, {o.rows, o.layout.in_features});
  Tensor chosen = torch::stable::new_empty(o.weight, {o.rows, o.layout.num_blocks});
  scope.check(launch_error_feedback(feedback_args(o, targets, chosen), o.rows, o.layout, scope.stream()));
  return {targets, chosen};
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) { m.impl("error_feedback", TORCH_BOX(&halfbyte::cuda::error_feedback)); }
