// Which way linear and linear_backward_input take on CUDA: a small table of named conditions, decided by shapes and the device
// alone (a graph can hold it).
#pragma once

#include <cstdint>
#include <optional>

#include "../formats.h"

namespace halfbyte::cuda {

enum class LinearRoute : int32_t {
  kSmall = 0,  // linear_small.cu: weights decoded straight into tensor core fragments, read once, never written
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
// Largest M of the tiled kernel: move it to where `gpu_check.py --only linear_routes` says that it stops winning over decoding +
// cuBLAS (it times both at M = 32 .. 1024). Put here by arithmetic, for 14336 x 4096 on an H200, bf16 and fp16 alike (fp32 is not
// taken), in us at M = 64, 128, 256:
//   62, 62, 73  decoding (41; 35 at the copy's 4.3 TB/s) + cuBLAS, which reads 117 MB
//   16, 32, 63  tiled, tensor cores: 2 M N K / (0.6 * 790e12 flop/s), what mma.sync reaches of cuBLAS' rate
//   21, 36, 73  + look-ups that nothing overlaps (linear_tiled.cu: 77, 87, 87 %)
//   28, 47, 93  + 112 of 132 multiprocessors busy, the start, the second pass
// So it wins by 2.2 at 64, by 1.3 at 128, and loses at 256. On an A100, where mma.sync has the full rate, the same arithmetic gives
// 2.2 and 1.4 (157 us to decode and multiply; its waves of CTAs fit this size worse).
constexpr int64_t kTiledM = 128;
// Where there is wgmma, kBesideWgmmaM is the tiled kernel's largest M and kWgmmaM the wgmma kernel's; the same measurement moves
// them. By arithmetic for the same weight, at M = 64, 128, 256, where 112 of 132 multiprocessors have a tile each of 64 steps, at
// 1.755 GHz:
//   12, 23, 47  tensor cores, at the 80 % of their peak that cuBLAS reaches (790e12 flop/s)
//   20, 27, 41  shared memory, the cycles of linear_wgmma.cu
//   16, 27, 48  L2 at an assumed 5.6 TB/s: each tile reads all of the input, 92, 150 and 268 MB
//   26, 34, 58  the largest, + 15 % that does not overlap, + 3 for the start and the sums' way out
//   28, 47, 93  the tiled kernel;  62, 62, 73  decoding + cuBLAS
// Nothing to win at 64, 1.4 at 128, 1.25 at 256. At 384 and 512 two tiles of rows of input make two waves, 90 and 115 against 95
// and 117: too close to send there unmeasured.
constexpr int64_t kBesideWgmmaM = 64;
constexpr int64_t kWgmmaM = 256;
// Largest M of backward's kernel; `gpu_check.py --only backwards` moves it, up to kBackwardMost. By arithmetic for the same weight:
// a step of 32 products takes 234 instructions (benchmarks/sass_counts.py), about the issue slots that mma.sync leaves: 14 us at
// M = 64, 28 at 128. L1 may be slower: some 64 lines and 32 look-ups of each of 8 warps a step, 768 cycles in line, against 468 of
// issuing. So at worst 29 us at 64 against 62 for decoding + cuBLAS, but 54 at 128, too close to send there unmeasured.
constexpr int64_t kBackwardM = 64;
constexpr int64_t kBackwardMost = 128;  // that it can take
// Largest M of backward's wgmma kernel; up to kBackwardM there is nothing to win over the one above. By arithmetic for the same
// weight, at M = 64, 128, 192, 256, where 32 tiles of columns times 4 splits are 128 of 132 multiprocessors with 56 steps each:
//   10, 20, 31, 41  tensor cores, at 80 % of their peak
//   20, 26, 32, 38  shared memory, the cycles of linear_backward_wgmma.cu
//   18, 29, 39, 50  L2 at an assumed 5.6 TB/s: 103, 161, 220 and 279 MB
//   26, 36, 48, 60  the largest, + 15 % that does not overlap, + 3 for the start and the sums' way out
//   30, 41, 55, 69  + the second pass: a launch, and 4, 8, 13 and 17 MB of sums written and read
//   62, 62, 67, 73  decoding (at the copy's rate) + cuBLAS
// So it wins by 1.5 at 128, 1.2 at 192 and little at 256, but 1.2 there too where packed has fewer rows than columns and needs no
// second pass.
constexpr int64_t kBackwardWgmmaM = 256;
// Elements that a step of the small kernel reduces over; they must share one scale.
constexpr int64_t kSmallChunk = 64;

// The wgmma kernels copy 16 bytes of packed at a time, backward's also of gradients.
inline bool has_wgmma(const LinearProblem& p) { return p.wgmma && p.packed_width >= 16; }
inline bool has_backward_wgmma(const LinearProblem& p) { return has_wgmma(p) && p.input_width >= 16; }

// A reason why none of the kernels can take a problem.
struct Obstacle {
  const char* name;
  bool (*applies)(const LinearProblem&);
};
inline constexpr Obstacle kLinearObstacles[] = {
    {"nothing to multiply", [](const LinearProblem& p) { return p.M < 1; }},
    // Past it the decoded weight is read often enough to pay for itself, and cuBLAS has the faster tensor core instructions.
    {"M is past kTiledM", [](const LinearProblem& p) { return p.M > kTiledM && !has_wgmma(p) && !p.forced; }},
    {"M is past kWgmmaM", [](const LinearProblem& p) { return p.M > kWgmmaM && has_wgmma(p) && !p.forced; }},
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
                      : problem.forced == LinearRoute::kTiled ? problem.M <= kBackwardMost
                      : problem.forced == LinearRoute::kWgmma ? has_backward_wgmma(problem)
                                                              : true;
    return able ? *problem.forced : LinearRoute::kDense;
  }
  if (problem.M <= kSmallM) return LinearRoute::kSmall;
  return problem.M > kBackwardM ? LinearRoute::kWgmma : LinearRoute::kTiled;
}

inline LinearRoute route(const LinearProblem& problem) {
  for (const Obstacle& obstacle : kLinearObstacles) {
    if (obstacle.applies(problem)) return LinearRoute::kDense;
  }
  if (problem.forced) {
    const bool able = problem.forced == LinearRoute::kSmall   ? problem.M <= kSmallM
                      : problem.forced == LinearRoute::kWgmma ? has_wgmma(problem)
                                                              : true;
    return able ? *problem.forced : LinearRoute::kDense;
  }
  if (problem.M <= kSmallM) return LinearRoute::kSmall;
  return problem.M > kBesideWgmmaM && has_wgmma(problem) ? LinearRoute::kWgmma : LinearRoute::kTiled;
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
// chunks. The number of ranges is the one that is done first. Nothing depends on M: a row of input gives the same bits in every
// batch that takes this way.
constexpr int64_t kTiledRows = 256;
constexpr int64_t kWgmmaRows = 128;
constexpr int64_t kWgmmaTokens = 256;  // rows of input a CTA at most

// Counted in chunks of a CTA: its waves of CTAs take their chunks and `start`, and with several ranges `sums` more a CTA to write
// and read its sums through L2, and once `second` for the second launch.
struct SplitCosts {
  int64_t start, sums, second;
};
constexpr SplitCosts kTiledCosts{2, 5, 5};  // a chunk is 0.6 us at M = 64
constexpr SplitCosts kWgmmaCosts{4, 8, 6};  // 0.45 us at M = 128, 0.7 at 256; the start fills a larger table and ring

constexpr int64_t least_splits(int64_t tiles, int64_t K, int64_t multiprocessors, const SplitCosts& costs) {
  const int64_t chunks = K / kSmallChunk;
  int64_t best = 1, least = 0;
  for (int64_t wanted = 1; wanted <= chunks && wanted <= 64; ++wanted) {
    const int64_t length = (chunks + wanted - 1) / wanted, splits = (chunks + length - 1) / length;  // none is empty
    const int64_t waves = (tiles * splits + multiprocessors - 1) / multiprocessors;
    const int64_t cost = waves * (length + costs.start + (splits > 1 ? costs.sums : 0)) + (splits > 1 ? costs.second : 0);
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
