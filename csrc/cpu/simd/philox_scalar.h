// Philox 4x32 one block at a time: what philox_avx2.h and philox_avx512.h do for several, one in each 64-bit lane.
#pragma once

#include "scalar.h"

namespace halfbyte::cpu {
namespace {

constexpr int kPhiloxLanes = 1;
constexpr int kPhiloxVectors = 2;  // at a time
using Wides = uint64_t;
inline Wides wide_splat(uint32_t x) { return x; }
inline Wides wide_count(uint64_t first) { return first; }
inline Wides wide_multiply(Wides a, Wides b) { return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu); }  // of the lower halves
inline Wides wide_upper(Wides a) { return a >> 32; }
inline Wides wide_xor(Wides a, Wides b, Wides c) { return a ^ b ^ c; }
inline Wides wide_pack(Wides low, Wides high) { return (low & 0xFFFFFFFFu) | high << 32; }  // the lower halves
// Lane 0 of both, lane 1 of both, and so on.
inline void wide_store_by_turns(void* p, Wides a, Wides b) {
  memcpy(p, &a, sizeof a);
  memcpy(static_cast<char*>(p) + sizeof a, &b, sizeof b);
}

// Bit i: random[i] >= least, for 8 kPhiloxLanes numbers. least <= 65536.
inline void store_at_least(const uint16_t* random, uint32_t least, uint8_t* bits) {
  uint32_t result = 0;
  for (int i = 0; i < 8; ++i) result |= uint32_t(random[i] >= least) << i;
  *bits = uint8_t(result);
}

}  // namespace
}  // namespace halfbyte::cpu
