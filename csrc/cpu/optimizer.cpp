// Fronts of the 8-bit optimizer steps on the CPU: check every tensor of the list, then one parallel region over all of them.
#include "../bridge.h"
#include "../checks.h"
#include "../optimizer_arguments.h"
#include "isa.h"
#include "optimizer_subnormals.h"

namespace halfbyte::cpu {
namespace {

// Consecutive blocks of one tensor: what a thread takes at a time.
struct Chunk {
  int64_t tensor, begin, end;
};

// About 8 K elements a chunk: small enough to balance two parameters over all threads, 1 us or more of work.
constexpr int64_t kChunkElements = 8192;

std::vector<Chunk> make_chunks(const std::vector<OptimizerTensor>& tensors, const std::vector<int64_t>& rows) {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t blocks = rows[i] * tensors[i].blocks_per_row;
    if (blocks == 0) continue;
    const int64_t block = tensors[i].row_length < kStateBlock ? tensors[i].row_length : kStateBlock;
    const int64_t per_chunk = kChunkElements / block > 0 ? kChunkElements / block : 1;
    for (int64_t b = 0; b < blocks; b += per_chunk)
      chunks.push_back({int64_t(i), b, b + per_chunk < blocks ? b + per_chunk : blocks});
  }
  return chunks;
}

float scalar_of(const Tensor& t) { return *t.const_data_ptr<float>(); }

void run(OptimizerRule rule, const OptimizerArguments& a, const OptimizerHyper& hyper) {
  check_optimizer_arguments(a, hyper);
  if (a.params.empty() || (a.found_inf && scalar_of(*a.found_inf) != 0.0f)) return;
  const double lr = a.lr_tensor ? double(scalar_of(*a.lr_tensor)) : hyper.lr;
  const double grad_scale = a.grad_scale ? double(scalar_of(*a.grad_scale)) : 1.0;
  std::vector<OptimizerTensor> tensors(a.params.size());
  std::vector<OptimizerScalars> scalars;
  std::vector<size_t> scalars_of(tensors.size());
  std::vector<int64_t> rows(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i == 0 || a.steps.size() > 1) {
      const float step = scalar_of(a.steps[i]);
      HALFBYTE_CHECK(step >= 1.0f && step <= 0x1p24f, a.op, "steps[", i,
                     "] must be the count of this step, from 1 to 2^24, got ", step);
      if (i == 0 || uint32_t(step) != scalars.back().step)
        scalars.push_back(optimizer_scalars(rule, hyper, lr, grad_scale, uint32_t(step)));
    }
    scalars_of[i] = scalars.size() - 1;
    rows[i] = fill_optimizer_tensor(a, i, tensors[i]);
  }
  const std::vector<Chunk> chunks = make_chunks(tensors, rows);
  const OptimizerKernels& kernel = kernels().optimizer;
  parallel_rows(int64_t(chunks.size()), 1, [&](int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    for (int64_t i = begin; i < end; ++i) {
      const Chunk& c = chunks[size_t(i)];
      kernel.update(rule, tensors[size_t(c.tensor)], scalars[scalars_of[size_t(c.tensor)]], c.begin, c.end);
    }
  });
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
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) {
  using halfbyte::OptimizerRule;
  m.impl("adamw8bit_step_", TORCH_BOX(&halfbyte::cpu::adam_step<OptimizerRule::kAdamW>));
  m.impl("adam8bit_step_", TORCH_BOX(&halfbyte::cpu::adam_step<OptimizerRule::kAdam>));
  m.impl("lion8bit_step_", TORCH_BOX(&halfbyte::cpu::lion_step));
  m.impl("sgd8bit_step_", TORCH_BOX(&halfbyte::cpu::sgd_step));
}
