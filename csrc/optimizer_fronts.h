// The ops' signatures of the 8-bit optimizer steps, one copy for every device: they gather the arguments and call `run`.
#pragma once

#include <torch/csrc/stable/library.h>

#include "bridge.h"
#include "optimizer_arguments.h"

namespace halfbyte {

using OptimizerRun = void (*)(OptimizerRule, const OptimizerArguments&, const OptimizerHyper&);

template <OptimizerRun run>
class OptimizerFronts {
  using Tensors = const TensorList&;
  using MaybeTensor = const std::optional<Tensor>&;
  using Offsets = const std::vector<int64_t>&;
  using Seed = std::optional<int64_t>;

  static void set_seed(OptimizerHyper& hyper, const Seed& seed) {
    hyper.stochastic = seed.has_value();
    hyper.seed = seed.value_or(0);
  }

  template <OptimizerRule RULE>
  static void adam_step(Tensors params, Tensors grads, Tensors exp_avg_codes, Tensors exp_avg_scales, Tensors exp_avg_sq_codes,
                        Tensors exp_avg_sq_scales, Tensors steps, double lr, MaybeTensor lr_tensor, double beta1, double beta2,
                        double eps, double weight_decay, bool maximize, MaybeTensor grad_scale, MaybeTensor found_inf,
                        Offsets element_offsets, Seed seed) {
    const char* op = RULE == OptimizerRule::kAdamW ? "adamw8bit_step_" : "adam8bit_step_";
    OptimizerHyper hyper{};
    hyper.lr = lr, hyper.beta1 = beta1, hyper.beta2 = beta2, hyper.eps = eps, hyper.weight_decay = weight_decay;
    hyper.maximize = maximize, set_seed(hyper, seed);
    run(RULE, {op, params, grads, exp_avg_codes, exp_avg_scales, &exp_avg_sq_codes, &exp_avg_sq_scales, steps, lr_tensor,
               grad_scale, found_inf, element_offsets},
        hyper);
  }

  static void lion_step(Tensors params, Tensors grads, Tensors exp_avg_codes, Tensors exp_avg_scales, Tensors steps, double lr,
                        MaybeTensor lr_tensor, double beta1, double beta2, double weight_decay, bool maximize,
                        MaybeTensor grad_scale, MaybeTensor found_inf, Offsets element_offsets, Seed seed) {
    OptimizerHyper hyper{};
    hyper.lr = lr, hyper.beta1 = beta1, hyper.beta2 = beta2, hyper.weight_decay = weight_decay;
    hyper.maximize = maximize, set_seed(hyper, seed);
    run(OptimizerRule::kLion, {"lion8bit_step_", params, grads, exp_avg_codes, exp_avg_scales, nullptr, nullptr, steps,
                               lr_tensor, grad_scale, found_inf, element_offsets},
        hyper);
  }

  static void sgd_step(Tensors params, Tensors grads, Tensors momentum_codes, Tensors momentum_scales, Tensors steps, double lr,
                       MaybeTensor lr_tensor, double momentum, double dampening, double weight_decay, bool nesterov,
                       bool maximize, MaybeTensor grad_scale, MaybeTensor found_inf, Offsets element_offsets, Seed seed) {
    OptimizerHyper hyper{};
    hyper.lr = lr, hyper.momentum = momentum, hyper.dampening = dampening, hyper.weight_decay = weight_decay;
    hyper.nesterov = nesterov, hyper.maximize = maximize, set_seed(hyper, seed);
    run(OptimizerRule::kSGD, {"sgd8bit_step_", params, grads, momentum_codes, momentum_scales, nullptr, nullptr, steps, lr_tensor,
                              grad_scale, found_inf, element_offsets},
        hyper);
  }

 public:
  static void implement(torch::stable::detail::StableLibrary& m) {
    m.impl("adamw8bit_step_", &Boxed<&OptimizerFronts::adam_step<OptimizerRule::kAdamW>>::call);
    m.impl("adam8bit_step_", &Boxed<&OptimizerFronts::adam_step<OptimizerRule::kAdam>>::call);
    m.impl("lion8bit_step_", &Boxed<&OptimizerFronts::lion_step>::call);
    m.impl("sgd8bit_step_", &Boxed<&OptimizerFronts::sgd_step>::call);
  }
};

}  // namespace halfbyte
