// Which way linear and linear_backward_input take on CUDA: a small table of named conditions, decided by shapes and the device
// alone (a graph can hold it).
#pragma once

#include <cstdint>
#include <optional>

#include "../formats.h"

namespace halfbyte::cuda {

enum class LinearRoute : int32_t {
  kSmall = 0,  // linear_small.cu, linear_single.cu: weights decoded straight into tensor core fragments, read once, never written
  kTiled = 1,  // linear_tiled.cu: the same for more rows of input. Backward: linear_backward.cu in both, with fewer CTAs here
  kDense = 2,  // one launch decodes the weight into a buffer of torch's allocator, then aten
  kWgmma = 3,  // linear_wgmma.cu: as kTiled, with the tensor core instructions of compute capability 9.0. Backward:
               // linear_backward_wgmma.cu
};
constexpr const char* kRouteNames[] = {"small", "tiled", "dense", "wgmma"};

struct LinearProblem {
  int64_t M, N, K;
  int32_t format;
  int64_t block_size;
  DType dtype;
  int input_width;   // largest of 16, 8, 4, 2, 1 bytes that divides the address and the pitch of input's rows
  int packed_width;  // likewise for packed
  bool wgmma = false;                 // the device has it, and this build its kernel (linear_wgmma_available)
  std::optional<LinearRoute> forced;  // linear_driver.h: lifts the limits of M for a measurement
};

// Largest M of the small kernel: two tensor core tiles of 8 columns.
constexpr int64_t kSmallM = 16;
// Largest M of the tiled kernel where there is no wgmma. Measured on an H100 (`gpu_check.py --only linear_routes`), 14336 x 4096, us at
// M = 32, 64, 128, 192, 256, for tiled and for decoding + cuBLAS: 33, 45, 73, 115, 146 against 101, 101, 103, 105, 108; of 4096 x 4096:
// 14, 18, 27, 44, 56 against 24, 25, 28, 30, 32.
constexpr int64_t kTiledM = 128;
// Where there is wgmma, kBesideWgmmaM is the tiled kernel's largest M and kWgmmaM the wgmma kernel's, kWgmmaLargeM of weights that
// leave an H100's L2 once they are decoded: there decoding + cuBLAS takes memory's time twice more. benchmarks/README.md ("gpu": linear
// by route) has the times of each route, of 14336 x 4096, 4096 x 4096 and 4096 x 14336.
constexpr int64_t kBesideWgmmaM = 32;
constexpr int64_t kWgmmaM = 256, kWgmmaLargeM = 512;
constexpr int64_t kLargeWeight = int64_t(1) << 25;  // elements
// Largest M of backward's kernel, which is all that it can take; where there is wgmma it takes no more than kSmallM. Measured on an
// H100 as above, in us at M = 32: 50, 36 by wgmma, 100 for decoding + cuBLAS. (A form for up to 128, which decoded once for each 32
// rows, took 89 and, of 4096 x 14336, 113 at M = 64, where wgmma takes 38 and 46 and decoding + cuBLAS 102: L1's data path.)
constexpr int64_t kBackwardM = 32;
// Largest M of backward's wgmma kernel. The same table ("backward") has its times at M = 32 to 512: at 384 it would still gain, 113 us
// against 146 for decoding + cuBLAS of 14336 x 4096, at 512 it loses.
constexpr int64_t kBackwardWgmmaM = 256;
// Elements that a step of the small kernel reduces over; they must share one scale.
constexpr int64_t kSmallChunk = 64;

// Backward's wgmma kernel copies 16 bytes of packed and of gradients at a time.
inline bool has_backward_wgmma(const LinearProblem& p) { return p.wgmma && p.packed_width >= 16 && p.input_width >= 16; }

inline int64_t most_wgmma(const LinearProblem& p) { return p.N * p.K > kLargeWeight ? kWgmmaLargeM : kWgmmaM; }

// A reason why none of the kernels can take a problem.
struct Obstacle {
  const char* name;
  bool (*applies)(const LinearProblem&);
};
inline constexpr Obstacle kLinearObstacles[] = {
    {"nothing to multiply", [](const LinearProblem& p) { return p.M < 1; }},
    // Past it the decoded weight is read often enough to pay for itself, and cuBLAS has the faster tensor core instructions.
    {"M is past kTiledM", [](const LinearProblem& p) { return p.M > kTiledM && !p.wgmma && !p.forced; }},
    {"M is past kWgmmaM", [](const LinearProblem& p) { return p.M > most_wgmma(p) && p.wgmma && !p.forced; }},
    {"nothing to compute", [](const LinearProblem& p) { return p.N < 1; }},
    // One byte of the row formats is one weight: another fragment layout.
    {"not a 4-bit format", [](const LinearProblem& p) { return !is_4bit(p.format); }},
    // A step of 64 elements has one scale for its accumulators.
    {"block size 32", [](const LinearProblem& p) { return p.block_size < kSmallChunk; }},
    {"K is not a multiple of 64", [](const LinearProblem& p) { return p.K % kSmallChunk != 0; }},
    // Tensor cores would round float32 activations to tf32.
    {"float32 input", [](const LinearProblem& p) { return p.dtype == DType::kFloat32; }},
    {"input is not 16-byte aligned", [](const LinearProblem& p) { return p.input_width < 16; }},
    {"packed is not 16-byte aligned", [](const LinearProblem& p) { return p.packed_width < 16; }},
    // Row and tile numbers are 32-bit in the kernel.
    {"N is 2^31 or more", [](const LinearProblem& p) { return p.N >= (int64_t(1) << 31) || p.K >= (int64_t(1) << 31); }},
};

// A reason why none of the kernels of linear_backward_input can take a problem; there `input` is grad_output (M, N).
inline constexpr Obstacle kBackwardObstacles[] = {
    {"nothing to multiply", [](const LinearProblem& p) { return p.M < 1; }},
    {"M is past kBackwardM", [](const LinearProblem& p) { return p.M > kBackwardM && !has_backward_wgmma(p) && !p.forced; }},
    {"M is past kBackwardWgmmaM",
     [](const LinearProblem& p) { return p.M > kBackwardWgmmaM && has_backward_wgmma(p) && !p.forced; }},
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
  if (problem.forced) {
    const bool able = problem.forced == LinearRoute::kSmall   ? problem.M <= kSmallM
                      : problem.forced == LinearRoute::kTiled ? problem.M <= kBackwardM
                      : problem.forced == LinearRoute::kWgmma ? has_backward_wgmma(problem)
                                                              : true;
    return able ? *problem.forced : LinearRoute::kDense;
  }
  if (problem.M <= kSmallM) return LinearRoute::kSmall;
  return has_backward_wgmma(problem) ? LinearRoute::kWgmma : LinearRoute::kTiled;
}

inline LinearRoute route(const LinearProblem& problem) {
  for (const Obstacle& obstacle : kLinearObstacles) {
    if (obstacle.applies(problem)) return LinearRoute::kDense;
  }
  if (problem.forced) {
    const bool able = problem.forced == LinearRoute::kSmall   ? problem.M <= kSmallM
                      : problem.forced == LinearRoute::kWgmma ? problem.wgmma
                                                              : true;
    return able ? *problem.forced : LinearRoute::kDense;
  }
  if (problem.M <= kSmallM) return LinearRoute::kSmall;
  return problem.M > kBesideWgmmaM && problem.wgmma ? LinearRoute::kWgmma : LinearRoute::kTiled;
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
constexpr int64_t kSmallResident = 2;  // CTAs a multiprocessor: 128 registers a thread, 40 KB of shared memory each; 3 gain nothing

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

// How the backward kernel covers (N, K): a CTA owns 256 columns and a contiguous range of steps of 16 rows. `resident`: CTAs a
// multiprocessor, kSmallResident up to kSmallM rows, 1 past them.
constexpr int64_t kBackwardColumns = 256;
constexpr int64_t kBackwardRows = 16;

constexpr int64_t backward_splits(int64_t N, int64_t K, int64_t multiprocessors, int64_t resident) {
  const int64_t tiles = (K + kBackwardColumns - 1) / kBackwardColumns, steps = (N + kBackwardRows - 1) / kBackwardRows;
  const int64_t wanted = multiprocessors * resident / tiles > 1 ? multiprocessors * resident / tiles : 1;  // one wave
  const int64_t most = steps / 16 > 1 ? steps / 16 : 1;  // at least 4 steps a warp
  return wanted < most ? wanted : most;
}

// How the tiled and the wgmma kernel cover (N, K): a CTA, one a multiprocessor, owns 256 or 128 rows and a contiguous range of
// chunks. The number of ranges is the one that is done first. It does not depend on M: a row of input gives the same bits in every
// batch that takes this way (by wgmma: up to 128 rows in a tile, whose two groups add their sums, and past it).
constexpr int64_t kTiledRows = 256;
constexpr int64_t kWgmmaRows = 128;
constexpr int64_t kWgmmaTokens = 256;  // rows of input a CTA at most
constexpr int64_t kWgmmaQuad = 4 * kSmallChunk;  // of the reduction: what is copied at a time, and what ranges are made of

// Counted in chunks of a CTA: its waves of CTAs take their chunks and `start`, and with several ranges `sums` more a CTA to write
// and read its sums through L2, and once `second` for the second launch. Ranges are made of `unit` chunks.
struct SplitCosts {
  int64_t unit, start, sums, second;
};
constexpr SplitCosts kTiledCosts{1, 2, 5, 5};  // a chunk is 0.6 us at M = 64
// 0.55 us at M = 64, 0.7 at 128, 1.0 at 256; the start fills a larger table and ring.
constexpr SplitCosts kWgmmaCosts{kWgmmaQuad / kSmallChunk, 4, 8, 6};

constexpr int64_t least_splits(int64_t tiles, int64_t K, int64_t multiprocessors, const SplitCosts& costs) {
  const int64_t units = (K / kSmallChunk + costs.unit - 1) / costs.unit;
  int64_t best = 1, least = 0;
  for (int64_t wanted = 1; wanted <= units && wanted <= 64; ++wanted) {
    const int64_t length = (units + wanted - 1) / wanted, splits = (units + length - 1) / length;  // none is empty
    const int64_t waves = (tiles * splits + multiprocessors - 1) / multiprocessors;
    const int64_t cost = waves * (length * costs.unit + costs.start + (splits > 1 ? costs.sums : 0)) + (splits > 1 ? costs.second : 0);
    if (wanted == 1 || cost < least) best = splits, least = cost;
  }
  return best;
}
constexpr int64_t tiled_splits(int64_t N, int64_t K, int64_t multiprocessors) {
  return least_splits((N + kTiledRows - 1) / kTiledRows, K, multiprocessors, kTiledCosts);
}
constexpr int64_t wgmma_splits(int64_t N, int64_t K, int64_t multiprocessors) {
  return least_splits((N + kWgmmaRows - 1) / kWgmmaRows, K, multiprocessors, kWgmmaCosts);
}
// Backward's wgmma kernel: a CTA owns as many columns, and ranges of N.
constexpr int64_t backward_wgmma_splits(int64_t N, int64_t K, int64_t multiprocessors) {
  return wgmma_splits(K, (N + kSmallChunk - 1) / kSmallChunk * kSmallChunk, multiprocessors);
}

}  // namespace halfbyte::cuda
