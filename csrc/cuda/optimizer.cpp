// Fronts of the 8-bit optimizer steps on CUDA: check every tensor of the list, then one launch for up to 336 of them.
// Values on the device (steps, lr_tensor, grad_scale, found_inf) stay there: a step count that is not from 1 to 2^24 stops
// the kernel with a device-side assertion.
#include "../bridge.h"
#include "../optimizer_arguments.h"
#include "kernels.h"
#include "optimizer_table.h"
#include "stream.h"

namespace halfbyte::cuda {
namespace {

const float* pointer(const std::optional<Tensor>& t) { return t ? t->const_data_ptr<float>() : nullptr; }

void run(OptimizerRule rule, const OptimizerArguments& a, const OptimizerHyper& hyper) {
  check_optimizer_arguments(a, hyper);
  if (a.params.empty()) return;
  std::vector<OptimizerTensor> tensors(a.params.size());
  std::vector<int64_t> rows(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    rows[i] = fill_optimizer_tensor(a, i, tensors[i]);
    HALFBYTE_CHECK(tensors[i].blocks_per_row < kMaxUnitsPerLaunch / 2, a.op, "params[", i, "] must have less than 2^38 elements a row, got ",
                   tensors[i].row_length);
  }
  std::vector<const float*> steps;
  for (const Tensor& step : a.steps) steps.push_back(step.const_data_ptr<float>());
  const OptimizerInputs inputs{pointer(a.lr_tensor), pointer(a.grad_scale), pointer(a.found_inf)};
  const LaunchScope scope(a.op, a.params[0]);
  scope.check(for_each_table(tensors, rows, steps, [&](const OptimizerTable& table) {
    return launch_optimizer(rule, table, hyper, inputs, scope.stream());
  }));
}

void set_seed(OptimizerHyper& hyper, const std::optional<int64_t>& seed) {
  hyper.stochastic = seed.has_value();
  hyper.seed = seed.value_or(0);
}

using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;

template <OptimizerRule RULE>
void adam_step(Tensors params, Tensors grads, Tensors exp_avg_codes, Tensors exp_avg_scales, Tensors exp_avg_sq_codes,
               Tensors exp_avg_sq_scales, Tensors steps, double lr, const MaybeTensor& lr_tensor, double beta1, double beta2,
               double eps, double weight_decay, bool maximize, const MaybeTensor& grad_scale, const MaybeTensor& found_inf,
               std::vector<int64_t> element_offsets, std::optional<int64_t> seed) {
  const char* op = RULE == OptimizerRule::kAdamW ? "adamw8bit_step_" : "adam8bit_step_";
  OptimizerHyper hyper{};
  hyper.lr = lr, hyper.beta1 = beta1, hyper.beta2 = beta2, hyper.eps = eps, hyper.weight_decay = weight_decay;
  hyper.maximize = maximize, set_seed(hyper, seed);
  run(RULE, {op, params, grads, exp_avg_codes, exp_avg_scales, &exp_avg_sq_codes, &exp_avg_sq_scales, steps, lr_tensor,
             grad_scale, found_inf, element_offsets},
      hyper);
}

void lion_step(Tensors params, Tensors grads, Tensors exp_avg_codes, Tensors exp_avg_scales, Tensors steps, double lr,
               const MaybeTensor& lr_tensor, double beta1, double beta2, double weight_decay, bool maximize,
               const MaybeTensor& grad_scale, const MaybeTensor& found_inf, std::vector<int64_t> element_offsets,
               std::optional<int64_t> seed) {
  OptimizerHyper hyper{};
  hyper.lr = lr, hyper.beta1 = beta1, hyper.beta2 = beta2, hyper.weight_decay = weight_decay;
  hyper.maximize = maximize, set_seed(hyper, seed);
  run(OptimizerRule::kLion, {"lion8bit_step_", params, grads, exp_avg_codes, exp_avg_scales, nullptr, nullptr, steps, lr_tensor,
                             grad_scale, found_inf, element_offsets},
      hyper);
}

void sgd_step(Tensors params, Tensors grads, Tensors momentum_codes, Tensors momentum_scales, Tensors steps, double lr,
              const MaybeTensor& lr_tensor, double momentum, double dampening, double weight_decay, bool nesterov,
              bool maximize, const MaybeTensor& grad_scale, const MaybeTensor& found_inf,
              std::vector<int64_t> element_offsets, std::optional<int64_t> seed) {
  OptimizerHyper hyper{};
  hyper.lr = lr, hyper.momentum = momentum, hyper.dampening = dampening, hyper.weight_decay = weight_decay;
  hyper.nesterov = nesterov, hyper.maximize = maximize, set_seed(hyper, seed);
  run(OptimizerRule::kSGD, {"sgd8bit_step_", params, grads, momentum_codes, momentum_scales, nullptr, nullptr, steps, lr_tensor,
                            grad_scale, found_inf, element_offsets},
      hyper);
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) {
  using halfbyte::OptimizerRule;
  m.impl("adamw8bit_step_", TORCH_BOX(&halfbyte::cuda::adam_step<OptimizerRule::kAdamW>));
  m.impl("adam8bit_step_", TORCH_BOX(&halfbyte::cuda::adam_step<OptimizerRule::kAdam>));
  m.impl("lion8bit_step_", TORCH_BOX(&halfbyte::cuda::lion_step));
  m.impl("sgd8bit_step_", TORCH_BOX(&halfbyte::cuda::sgd_step));
}
