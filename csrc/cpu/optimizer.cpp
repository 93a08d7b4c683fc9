// Fronts of the 8-bit optimizer steps on the CPU: check every tensor of the list, then one parallel region over all of them.
#include "../bridge.h"
#include "../checks.h"
#include "../optimizer_fronts.h"
#include "isa.h"
#include "optimizer_subnormals.h"

namespace halfbyte::cpu {
namespace {

// About 8 K elements at a time: small enough to balance two parameters over all threads, 1 us or more of work.
int64_t blocks_at_once(const OptimizerTensor& t) {
  constexpr int64_t kElements = 8192;
  return std::max<int64_t>(1, kElements / std::clamp<int64_t>(t.row_length, 1, kStateBlock));
}

float scalar_of(const Tensor& t) { return *t.const_data_ptr<float>(); }

void run(OptimizerRule rule, const OptimizerArguments& a, const OptimizerHyper& hyper) {
  check_optimizer_arguments(a, hyper);
  if (a.params.empty() || (a.found_inf && scalar_of(*a.found_inf) != 0.0f)) return;
  const double lr = a.lr_tensor ? double(scalar_of(*a.lr_tensor)) : hyper.lr;
  const double grad_scale = a.grad_scale ? double(scalar_of(*a.grad_scale)) : 1.0;
  const auto [tensors, rows] = OptimizerTensors(a);
  std::vector<OptimizerScalars> scalars;
  std::vector<size_t> scalars_of(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i == 0 || a.steps.size() > 1) {
      const float step = scalar_of(a.steps[i]);
      HALFBYTE_CHECK(step >= 1.0f && step <= 0x1p24f, a.op, "steps[", i,
                     "] must be the count of this step, from 1 to 2^24, got ", step);
      if (i == 0 || uint32_t(step) != scalars.back().step)
        scalars.push_back(optimizer_scalars(rule, hyper, lr, grad_scale, uint32_t(step)));
    }
    scalars_of[i] = scalars.size() - 1;
  }
  std::vector<int64_t> blocks, grain;
  for (size_t i = 0; i < tensors.size(); ++i) {
    blocks.push_back(rows[i] * tensors[i].blocks_per_row);
    grain.push_back(blocks_at_once(tensors[i]));
  }
  const OptimizerKernels& kernel = kernels().optimizer;
  parallel_lists(blocks, grain, [&, &tensors = tensors](size_t i, int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    kernel.update(rule, tensors[i], scalars[scalars_of[i]], begin, end);
  });
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) { halfbyte::OptimizerFronts<halfbyte::cpu::run>::implement(m); }
