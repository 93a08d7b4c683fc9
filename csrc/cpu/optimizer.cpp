// Fronts of the 8-bit optimizer steps on the CPU: check every tensor of the list, then one parallel region over all of them.
#include <algorithm>

#include "../bridge.h"
#include "../checks.h"
#include "../optimizer_fronts.h"
#include "isa.h"
#include "optimizer_subnormals.h"

namespace halfbyte::cpu {
namespace {

// Consecutive blocks of one tensor.
struct Chunk {
  int64_t tensor, begin, end;
};

// What a thread takes at a time: chunks [starts[i], starts[i + 1]), about kTaskWork elements.
struct Tasks {
  std::vector<Chunk> chunks;
  std::vector<size_t> starts;
  int64_t count() const { return int64_t(starts.size()) - 1; }
};

// Small enough to balance two parameters over all threads.
constexpr int64_t kTaskWork = 8192;
// Work of a block of a row, in elements of long rows. Its scales and maxima cost as much as 48 elements whatever its length, but short
// rows of a power of two, as LoRA has them, share that with their neighbours.
int64_t block_work(int64_t row_length) {
  const bool shared = row_length <= 32 && (row_length & (row_length - 1)) == 0;
  return shared ? row_length + 4 : std::clamp(row_length, int64_t(48), kStateBlock);
}
// A thread that sleeps has to wake, and one that spins takes the core from others: a second one is asked only past 32 K elements,
// whose work takes about as long as waking.
constexpr int64_t kTasksPerThread = 4;

Tasks make_tasks(const std::vector<OptimizerTensor>& tensors, const std::vector<int64_t>& rows) {
  Tasks tasks;
  tasks.chunks.reserve(tensors.size());
  int64_t work = kTaskWork;  // of the last task
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t blocks = rows[i] * tensors[i].blocks_per_row;
    const int64_t of_block = block_work(tensors[i].row_length);
    for (int64_t b = 0; b < blocks;) {
      if (work >= kTaskWork) {
        tasks.starts.push_back(tasks.chunks.size());
        work = 0;
      }
      const int64_t end = std::min(blocks, b + (kTaskWork - work + of_block - 1) / of_block);
      tasks.chunks.push_back({int64_t(i), b, end});
      work += (end - b) * of_block;
      b = end;
    }
  }
  tasks.starts.push_back(tasks.chunks.size());
  return tasks;
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
      const float step = scalar_of(a.steps.tensor(i));
      HALFBYTE_CHECK(step >= 1.0f && step <= 0x1p24f, a.op, "steps[", i,
                     "] must be the count of this step, from 1 to 2^24, got ", step);
      if (i == 0 || uint32_t(step) != scalars.back().step)
        scalars.push_back(optimizer_scalars(rule, hyper, lr, grad_scale, uint32_t(step)));
    }
    scalars_of[i] = scalars.size() - 1;
  }
  const Tasks tasks = make_tasks(tensors, rows);
  const OptimizerKernels& kernel = kernels().optimizer;
  parallel_rows(tasks.count(), kTasksPerThread, [&, &tensors = tensors](int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    for (size_t i = tasks.starts[size_t(begin)]; i < tasks.starts[size_t(end)]; ++i) {
      const Chunk& c = tasks.chunks[i];
      kernel.update(rule, tensors[size_t(c.tensor)], scalars[scalars_of[size_t(c.tensor)]], c.begin, c.end);
    }
  });
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) { halfbyte::OptimizerFronts<halfbyte::cpu::run>::implement(m); }
