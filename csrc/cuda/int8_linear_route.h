// Which way int8_linear takes on CUDA, decided by shapes alone.
#pragma once

#include <cstdint>

namespace halfbyte::cuda {

struct Int8Problem {
  int64_t M, N, K;
};

// aten::_int_mm wants more than 16 rows: fewer get zeros below them. (benchmarks/README.md, "gpu", 16 rows of 4096 x 4096: 20.0 us; by
// int8_linear.cu, of 8a54de0, 35.3.)
constexpr int64_t kIntMMRows = 32;

// A reason why aten::_int_mm (cuBLASLt on int8 tensor cores) cannot take a problem; then int8_linear.cu multiplies.
struct Int8Obstacle {
  const char* name;
  bool (*applies)(const Int8Problem&);
};
inline constexpr Int8Obstacle kInt8Obstacles[] = {
    // _int_mm's own demands.
    {"there is nothing to multiply", [](const Int8Problem& p) { return p.M == 0; }},
    {"N is not a multiple of 8", [](const Int8Problem& p) { return p.N % 8 != 0 || p.N == 0; }},
    {"K is not a multiple of 8", [](const Int8Problem& p) { return p.K % 8 != 0; }},
    {"M, N or K is 2^31 or more",
     [](const Int8Problem& p) { return p.M >= (int64_t(1) << 31) || p.N >= (int64_t(1) << 31) || p.K >= (int64_t(1) << 31); }},
};

inline bool takes_int_mm(const Int8Problem& problem) {
  for (const Int8Obstacle& obstacle : kInt8Obstacles) {
    if (obstacle.applies(problem)) return false;
  }
  return true;
}

}  // namespace halfbyte::cuda
