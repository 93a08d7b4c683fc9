// Front of error_feedback on the CPU: check, allocate, split tiles of rows over threads.
#include <memory>

#include "../feedback_operands.h"
#include "isa.h"
#include "kernels.h"

namespace halfbyte::cpu {
namespace {

std::tuple<Tensor, Tensor> error_feedback(const Tensor& weight, const std::optional<Tensor>& factor, const Tensor& importance,
                                          const std::optional<Tensor>& scales, const Tensor& candidates, int64_t format,
                                          int64_t block_size) {
  const FeedbackOperands o = checked_feedback(weight, factor, importance, scales, candidates, format, block_size);
  Tensor targets = new_tensor(o.weight, {o.rows, o.layout.in_features}, ScalarType::Float);
  Tensor chosen = new_tensor(o.weight, {o.rows, o.layout.num_blocks}, ScalarType::Float);
  const FeedbackArgs args = feedback_args(o, targets, chosen);
  const FeedbackKernels& kernel = kernels().feedback;
  const int64_t tile = kernel.tile_rows;
  parallel_rows((o.rows + tile - 1) / tile, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> scratch(new float[size_t(kernel.scratch_floats(o.layout.in_features))]);
    kernel.run(args, o.layout, begin * tile, end * tile < o.rows ? end * tile : o.rows, scratch.get());
  });
  return {targets, chosen};
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) { m.impl("error_feedback", TORCH_BOX(&halfbyte::cpu::error_feedback)); }
