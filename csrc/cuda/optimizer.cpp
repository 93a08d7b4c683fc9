// Fronts of the 8-bit optimizer steps on CUDA: check every tensor of the list, then one launch for up to 336 of them.
// Values on the device (steps, lr_tensor, grad_scale, found_inf) stay there: a step count that is not from 1 to 2^24 stops
// the kernel with a device-side assertion.
#include "../bridge.h"
#include "../optimizer_fronts.h"
#include "kernels.h"
#include "optimizer_table.h"
#include "stream.h"

namespace halfbyte::cuda {
namespace {

const float* pointer(const std::optional<Tensor>& t) { return t ? t->const_data_ptr<float>() : nullptr; }

void run(OptimizerRule rule, const OptimizerArguments& a, const OptimizerHyper& hyper) {
  check_optimizer_arguments(a, hyper);
  if (a.params.empty()) return;
  const auto [tensors, rows] = OptimizerTensors(a);
  for (size_t i = 0; i < tensors.size(); ++i) {
    HALFBYTE_CHECK(tensors[i].blocks_per_row < kMaxUnitsPerLaunch / 2, a.op, "params[", i, "] must have less than 2^38 elements a row, got ",
                   tensors[i].row_length);
  }
  std::vector<const float*> steps;
  for (size_t i = 0; i < a.steps.size(); ++i) steps.push_back(a.steps.tensor(i).const_data_ptr<float>());
  const OptimizerInputs inputs{pointer(a.lr_tensor), pointer(a.grad_scale), pointer(a.found_inf)};
  const LaunchScope scope(a.op, a.params.tensor(0));
  scope.check(for_each_table(tensors, rows, steps, [&](const OptimizerTable& table) {
    return launch_optimizer(rule, table, hyper, inputs, scope.stream());
  }));
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) { halfbyte::OptimizerFronts<halfbyte::cuda::run>::implement(m); }
