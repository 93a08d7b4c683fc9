// Which way linear and linear_backward_input take on CUDA: a small table of named conditions, decided by shapes alone (a graph can hold it).
#pragma once

#include <cstdint>

#include "../formats.h"

namespace halfbyte::cuda {

struct LinearProblem {
  int64_t M, N, K;
  int32_t format;
  int64_t block_size;
  DType dtype;
  int input_width;   // largest of 16, 8, 4, 2, 1 bytes that divides the address and the pitch of input's rows
  int packed_width;  // likewise for packed
};

// Largest M of the small kernel: two tensor core tiles of 8 columns.
constexpr int64_t kSmallM = 16;
// Elements that a step of the small kernel reduces over; they must share one scale.
constexpr int64_t kSmallChunk = 64;

enum class LinearRoute : int32_t {
  kSmall = 0,  // linear_small.cu: weights decoded straight into tensor core fragments, read once, never written
  kDense = 1,  // one launch decodes the weight into a buffer of torch's allocator, then aten
};

// A reason why the small kernel cannot take a problem.
struct Obstacle {
  const char* name;
  bool (*applies)(const LinearProblem&);
};
inline constexpr Obstacle kSmallObstacles[] = {
    // Past 16 the weights would have to be decoded again per 16 columns; the dense way decodes once.
    {"M > 16", [](const LinearProblem& p) { return p.M < 1 || p.M > kSmallM; }},
    {"nothing to compute", [](const LinearProblem& p) { return p.N < 1; }},
    // One byte of the row formats is one weight: another fragment layout.
    {"not a 4-bit format", [](const LinearProblem& p) { return !is_4bit(p.format); }},
    // A step of 64 elements has one scale for its accumulators.
    {"block size 32", [](const LinearProblem& p) { return p.block_size < kSmallChunk; }},
    {"K is not a multiple of 64", [](const LinearProblem& p) { return p.K % kSmallChunk != 0; }},
    // Tensor cores would round float32 activations to tf32.
    {"float32 input", [](const LinearProblem& p) { return p.dtype == DType::kFloat32; }},
    {"input is not 16-byte aligned", [](const LinearProblem& p) { return p.input_width < 16; }},
    {"packed is not 8-byte aligned", [](const LinearProblem& p) { return p.packed_width < 8; }},
    // Row and tile numbers are 32-bit in the kernel.
    {"N is 2^31 or more", [](const LinearProblem& p) { return p.N >= (int64_t(1) << 31) || p.K >= (int64_t(1) << 31); }},
};

// A reason why the small kernel of linear_backward_input cannot take a problem; there `input` is grad_output (M, N).
inline constexpr Obstacle kBackwardObstacles[] = {
    {"M > 16", [](const LinearProblem& p) { return p.M < 1 || p.M > kSmallM; }},
    {"not a 4-bit format", [](const LinearProblem& p) { return !is_4bit(p.format); }},
    // A lane takes 16 columns of 4 rows: all of them exist, or none.
    {"K is not a multiple of 16", [](const LinearProblem& p) { return p.K % 16 != 0; }},
    {"N is not a multiple of 4", [](const LinearProblem& p) { return p.N % 4 != 0 || p.N == 0; }},
    {"float32 grad_output", [](const LinearProblem& p) { return p.dtype == DType::kFloat32; }},
    {"grad_output is not 8-byte aligned", [](const LinearProblem& p) { return p.input_width < 8; }},
    {"packed is not 8-byte aligned", [](const LinearProblem& p) { return p.packed_width < 8; }},
    {"N or K is 2^30 or more", [](const LinearProblem& p) { return p.N >= (int64_t(1) << 30) || p.K >= (int64_t(1) << 30); }},
};

inline LinearRoute backward_route(const LinearProblem& problem) {
  for (const Obstacle& obstacle : kBackwardObstacles) {
    if (obstacle.applies(problem)) return LinearRoute::kDense;
  }
  return LinearRoute::kSmall;
}

inline LinearRoute route(const LinearProblem& problem) {
  for (const Obstacle& obstacle : kSmallObstacles) {
    if (obstacle.applies(problem)) return LinearRoute::kDense;
  }
  return LinearRoute::kSmall;
}

// How the small kernel covers (N, K): a CTA owns 16 rows of packed and a contiguous range of chunks, its 8 warps interleave
// the range. `splits` ranges exist so that every multiprocessor has work; their sums are added by a second launch in a fixed
// order. Nothing depends on M: a row of input gives the same bits in every batch of 1 to 16 rows.
struct SmallPlan {
  int64_t tiles;   // of 16 rows
  int64_t splits;  // of K
  int64_t grid;    // CTAs per split; each loops over tiles
};
constexpr int64_t kSmallRows = 16;
constexpr int64_t kSmallWarps = 8;
constexpr int64_t kSmallResident = 2;  // CTAs a multiprocessor: 128 registers a thread, 40 KB of shared memory each

constexpr SmallPlan small_plan(int64_t N, int64_t K, int64_t multiprocessors) {
  SmallPlan plan{};
  plan.tiles = (N + kSmallRows - 1) / kSmallRows;
  const int64_t resident = multiprocessors * kSmallResident, chunks = K / kSmallChunk;
  // At least 4 chunks a warp, one round of loads in flight.
  const int64_t most = chunks / (4 * kSmallWarps) > 1 ? chunks / (4 * kSmallWarps) : 1;
  const int64_t wanted = resident / plan.tiles > 1 ? resident / plan.tiles : 1;
  plan.splits = wanted < most ? wanted : most;
  const int64_t room = resident / plan.splits > 1 ? resident / plan.splits : 1;
  plan.grid = plan.tiles < room ? plan.tiles : room;
  return plan;
}

// How the small backward kernel covers (N, K): a CTA owns 256 columns and a contiguous range of steps of 16 rows.
constexpr int64_t kBackwardColumns = 256;
constexpr int64_t kBackwardRows = 16;

constexpr int64_t backward_splits(int64_t N, int64_t K, int64_t multiprocessors) {
  const int64_t tiles = (K + kBackwardColumns - 1) / kBackwardColumns, steps = (N + kBackwardRows - 1) / kBackwardRows;
  const int64_t wanted = multiprocessors * kSmallResident / tiles > 1 ? multiprocessors * kSmallResident / tiles : 1;  // one wave
  const int64_t most = steps / 16 > 1 ? steps / 16 : 1;  // at least 4 steps a warp
  return wanted < most ? wanted : most;
}

}  // namespace halfbyte::cuda
