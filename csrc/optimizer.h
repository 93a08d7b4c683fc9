// 8-bit optimizer steps: the data that kernels work on, for CPU and CUDA. Raw pointers, no torch.
//
// The rules are those of torch.optim in fp32 (halfbyte/reference_optimizer.py writes them out); moments are coded per
// block of up to kStateBlock elements of one row (dynamic_map.h).
#pragma once

#include <cmath>
#include <cstdint>

#include "dynamic_map.h"
#include "formats.h"

namespace halfbyte {

enum class OptimizerRule : int32_t { kAdamW = 0, kAdam = 1, kLion = 2, kSGD = 3 };

// One parameter and its state: N rows of K elements; a 1-D parameter is one row.
struct OptimizerTensor {
  void* param;              // (N, K) of param_dtype
  const void* grad;         // (N, K) of grad_dtype
  uint8_t* codes[2];        // (N, K) first and second moment; the second is null for rules with one moment
  float* scales[2];         // (N, blocks_per_row)
  int64_t row_length;       // K
  int64_t blocks_per_row;   // ceil(K / kStateBlock)
  uint64_t element_offset;  // index of this tensor's first element among all elements of the optimizer (stochastic rounding)
  DType param_dtype;
  DType grad_dtype;
};

// Hyper-parameters as the caller gave them; those a rule does not have are 0.
struct OptimizerHyper {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
  int64_t seed;  // of stochastic rounding
  bool stochastic, nesterov, maximize;
};

// What a step multiplies with: computed in fp64 from the hyper-parameters, the learning rate, the gradient scale and the
// step count, rounded to fp32 once.
struct OptimizerScalars {
  float grad_factor;    // 1 / grad_scale; negative when maximizing
  float step_size;      // Adam, AdamW: lr / (1 - beta1^t); Lion, SGD: lr
  float first_keep;     // weight of the stored first moment: beta1, Lion: beta2, SGD: momentum
  float first_take;     // weight of the gradient in it: 1 - beta1, Lion: 1 - beta2, SGD: 1 - dampening (1 at the first step)
  float second_keep;    // weight of the stored second moment: beta2; Lion: beta1 of the interpolation that is signed
  float second_take;    // 1 - beta2; Lion: 1 - beta1
  float second_factor;  // 1 / sqrt(1 - beta2^t)
  float eps;
  float decay;          // AdamW, Lion: 1 - lr * weight_decay, multiplies the parameter
  float weight_decay;   // Adam, SGD: added to the gradient, times the parameter
  float momentum;       // SGD with nesterov
  uint32_t step;        // t, 1 at the first step
  uint64_t seed;
  bool nesterov;
  bool stochastic;      // round bf16 and fp16 parameters stochastically
};

// base^exponent by squaring: the same bits on every device, unlike pow.
HALFBYTE_HD inline double power(double base, uint32_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1u) result *= base;
    base *= base;
  }
  return result;
}

HALFBYTE_HD inline OptimizerScalars optimizer_scalars(OptimizerRule rule, const OptimizerHyper& h, double lr,
                                                      double grad_scale, uint32_t step) {
  OptimizerScalars s{};
  s.grad_factor = float((h.maximize ? -1.0 : 1.0) / grad_scale);
  s.step = step;
  s.seed = uint64_t(h.seed);
  s.stochastic = h.stochastic;
  s.step_size = float(lr);
  s.eps = float(h.eps);
  s.decay = float(1.0 - lr * h.weight_decay);
  switch (rule) {
    case OptimizerRule::kAdam:
      s.weight_decay = float(h.weight_decay);
      [[fallthrough]];
    case OptimizerRule::kAdamW:
      s.step_size = float(lr / (1.0 - power(h.beta1, step)));
      s.first_keep = float(h.beta1);
      s.first_take = float(1.0 - h.beta1);
      s.second_keep = float(h.beta2);
      s.second_take = float(1.0 - h.beta2);
      s.second_factor = float(1.0 / sqrt(1.0 - power(h.beta2, step)));
      break;
    case OptimizerRule::kLion:
      s.first_keep = float(h.beta2);
      s.first_take = float(1.0 - h.beta2);
      s.second_keep = float(h.beta1);
      s.second_take = float(1.0 - h.beta1);
      break;
    case OptimizerRule::kSGD:
      s.first_keep = float(h.momentum);
      s.first_take = step == 1 ? 1.0f : float(1.0 - h.dampening);
      s.weight_decay = float(h.weight_decay);
      s.momentum = float(h.momentum);
      s.nesterov = h.nesterov;
      break;
  }
  return s;
}

}  // namespace halfbyte
