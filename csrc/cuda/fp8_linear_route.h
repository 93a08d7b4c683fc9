// Which way fp8_linear takes on CUDA, decided by shapes, types and the device alone.
#pragma once

#include <cstdint>

#include "../formats.h"

namespace halfbyte::cuda {

struct FP8Problem {
  int64_t M, N, K;
  DType dtype;       // of input, output and bias
  int packed_width;  // largest of 16, 8, 4, 2, 1 bytes that divides the address and the pitch of packed's rows
  int capability;    // compute capability, 10 * major + minor
};

// A reason why aten::_scaled_mm with one scale per row of either side cannot take a problem; then both sides are decoded. The
// demands are those of torch 2.11 to 2.13 (aten/src/ATen/native/cuda/ScaledBlas.cpp and RowwiseScaledMM.cu) and of cuBLASLt
// behind it: mat1 row-major, mat2 column-major, each with any pitch of a multiple of 16 bytes (pytorch#134225, pytorch#108308),
// so packed rows are taken where they lie; scales contiguous float32 of (M, 1) and (1, N), which is why they are gathered.
struct FP8Obstacle {
  const char* name;
  bool (*applies)(const FP8Problem&);
};
inline constexpr FP8Obstacle kFP8Obstacles[] = {
    {"no fp8 tensor cores (compute capability below 8.9)", [](const FP8Problem& p) { return p.capability < 89; }},
    // torch hands it to cuBLASLt, which answers CUBLAS_STATUS_NOT_SUPPORTED (pytorch#192707).
    {"compute capability 12", [](const FP8Problem& p) { return p.capability >= 120; }},
    // "Only bf16 high precision output types are supported for row-wise scaling" where cuBLASLt is older than 12.9.
    {"input is not bfloat16", [](const FP8Problem& p) { return p.dtype != DType::kBFloat16; }},
    // "mat2 shape must be divisible by 16"; a multiple of 16 also makes the pitch of the tokens' codes one.
    {"K is not a multiple of 16", [](const FP8Problem& p) { return p.K % 16 != 0; }},
    {"N is not a multiple of 16", [](const FP8Problem& p) { return p.N % 16 != 0 || p.N == 0; }},
    {"packed is not 16-byte aligned", [](const FP8Problem& p) { return p.packed_width < 16; }},
    {"M, N or K is 2^31 or more",
     [](const FP8Problem& p) { return p.M >= (int64_t(1) << 31) || p.N >= (int64_t(1) << 31) || p.K >= (int64_t(1) << 31); }},
};

// The first obstacle's index, or -1 where aten::_scaled_mm takes the problem.
inline int fp8_obstacle(const FP8Problem& problem) {
  int index = 0;
  for (const FP8Obstacle& obstacle : kFP8Obstacles) {
    if (obstacle.applies(problem)) return index;
    ++index;
  }
  return -1;
}

}  // namespace halfbyte::cuda
