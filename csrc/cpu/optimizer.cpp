// Fronts of the 8-bit optimizer steps on the CPU: check every tensor of the list, then one parallel region over all of them.
#include "../bridge.h"
#include "../checks.h"
#include "../optimizer_fronts.h"
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
  const std::vector<Chunk> chunks = make_chunks(tensors, rows);
  const OptimizerKernels& kernel = kernels().optimizer;
  parallel_rows(int64_t(chunks.size()), 1, [&, &tensors = tensors](int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    for (int64_t i = begin; i < end; ++i) {
      const Chunk& c = chunks[size_t(i)];
      kernel.update(rule, tensors[size_t(c.tensor)], scalars[scalars_of[size_t(c.tensor)]], c.begin, c.end);
    }
  });
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) { halfbyte::OptimizerFronts<halfbyte::cpu::run>::implement(m); }
