// The list of an optimizer step as kernel arguments (task_table.h).
#pragma once

#include <vector>

#include "../optimizer.h"
#include "task_table.h"

namespace halfbyte::cuda {

// How an entry is read and written: element by element, 8 elements at a time, or that with whole blocks only, bf16 parameters
// and bf16 gradients: what large models have, without a branch or a length to look at.
enum class Access : uint8_t { kElements, kVector, kPlain };

// A parameter, or a range of its rows. 2^log2_lanes neighbouring threads own one block: as many as a whole row needs when it is
// narrow (r=16 LoRA: 2 lanes, 16 rows a warp), else the 32 of a warp. A warp takes 32 >> log2_lanes blocks at a time: a task.
struct TableEntry {
  void* param;
  const void* grad;
  uint8_t* codes[2];
  float* scales[2];
  const float* step;
  uint64_t element_offset;
  int64_t row_length;
  FastDivisor blocks_per_row;
  uint32_t blocks;
  uint32_t first_task;  // tasks of the entries before this one
  uint8_t param_dtype, grad_dtype;
  uint8_t log2_lanes;
  Access access;
};

// 336 entries of 96 bytes stay below the 32764 bytes that CUDA 12.1 allows for kernel arguments.
struct OptimizerTable : TaskTable<TableEntry, 336> {};

// What the kernel reads from device memory besides the table.
struct OptimizerInputs {
  const float* lr;          // or null: hyper.lr
  const float* grad_scale;  // or null: 1
  const float* found_inf;   // or null; not 0: nothing is written
};

static_assert(sizeof(TableEntry) == 96);
static_assert(sizeof(OptimizerTable) + sizeof(OptimizerHyper) + sizeof(OptimizerInputs) <= 32764,
              "CUDA allows 32764 bytes of kernel arguments");

inline uint8_t log2_lanes_for(int64_t row_length) {
  uint8_t log2 = 0;
  while (log2 < 5 && (kUnit << log2) < row_length) ++log2;
  return log2;
}

constexpr uint32_t tasks_of(uint32_t blocks, uint32_t log2_lanes) { return uint32_t(((uint64_t(blocks) << log2_lanes) + 31) / 32); }

inline bool is_vector(const OptimizerTensor& t) {
  const auto fits = [&](const void* p) { return access_width(p, t.row_length) >= kUnit; };
  const auto bytes = [](DType d) { return d == DType::kFloat32 ? int64_t(4) : int64_t(2); };
  // 8 elements are two 16-byte accesses (fp32), one (16-bit) or one of 8 bytes (codes).
  return t.row_length % kUnit == 0 && access_width(t.param, t.row_length * bytes(t.param_dtype)) == 16 &&
         access_width(t.grad, t.row_length * bytes(t.grad_dtype)) == 16 && fits(t.codes[0]) &&
         (!t.codes[1] || fits(t.codes[1]));
}

inline Access access_of(const OptimizerTensor& t, uint32_t blocks) {
  if (!is_vector(t)) return Access::kElements;
  const bool plain = t.row_length % kStateBlock == 0 && t.param_dtype == DType::kBFloat16 && t.grad_dtype == DType::kBFloat16;
  return plain && blocks < uint32_t(1) << 27 ? Access::kPlain : Access::kVector;  // units of 8 fit 32 bits
}

// Splits the list into tables of less than 2^31 blocks and tasks each; one launch each.
// Calls launch(table) until it returns non-zero and returns what the last call returned.
template <class Launch>
auto for_each_table(const std::vector<OptimizerTensor>& tensors, const std::vector<int64_t>& rows,
                    const std::vector<const float*>& steps, const Launch& launch) {
  TableLauncher<OptimizerTable, Launch> tables(launch);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const OptimizerTensor& t = tensors[i];
    if (t.blocks_per_row == 0) continue;
    const int64_t rows_at_once = (kMaxUnitsPerLaunch / 2) / t.blocks_per_row;
    for (int64_t r = 0; r < rows[i]; r += rows_at_once) {
      const int64_t count = rows[i] - r < rows_at_once ? rows[i] - r : rows_at_once;
      TableEntry e{};
      const int64_t start = r * t.row_length, first_block = r * t.blocks_per_row;
      e.param = static_cast<char*>(t.param) + start * (t.param_dtype == DType::kFloat32 ? 4 : 2);
      e.grad = static_cast<const char*>(t.grad) + start * (t.grad_dtype == DType::kFloat32 ? 4 : 2);
      for (int m = 0; m < 2; ++m) {
        e.codes[m] = t.codes[m] ? t.codes[m] + start : nullptr;
        e.scales[m] = t.scales[m] ? t.scales[m] + first_block : nullptr;
      }
      e.step = steps.size() == 1 ? steps[0] : steps[i];
      e.element_offset = t.element_offset + uint64_t(start);
      e.row_length = t.row_length;
      e.blocks_per_row = FastDivisor(uint32_t(t.blocks_per_row));
      e.blocks = uint32_t(count * t.blocks_per_row);
      e.param_dtype = uint8_t(t.param_dtype);
      e.grad_dtype = uint8_t(t.grad_dtype);
      e.log2_lanes = log2_lanes_for(t.row_length);
      e.access = access_of(t, e.blocks);
      if (!tables.add(e, tasks_of(e.blocks, e.log2_lanes))) return tables.finish();
    }
  }
  return tables.finish();
}

}  // namespace halfbyte::cuda
