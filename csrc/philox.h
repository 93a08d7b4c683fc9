// Philox 4x32-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405): the random bits of stochastic rounding and of dropout, which
// depend on (seed, step, element index) alone, on every device.
#pragma once

#include <cstdint>

#include "formats.h"

namespace halfbyte {
namespace {  // compiled once per instruction set: no copy of one may be linked into another

struct Philox {
  uint32_t word0, word1, word2, word3;
};

inline constexpr int kPhiloxRounds = 10;
inline constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u, kPhiloxKey0 = 0x9E3779B9u, kPhiloxKey1 = 0xBB67AE85u;

HALFBYTE_HD inline Philox philox(uint64_t counter, uint32_t step, uint64_t seed) {
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = step, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t(kPhiloxFactor0) * c0, p1 = uint64_t(kPhiloxFactor1) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    k0 += kPhiloxKey0;
    k1 += kPhiloxKey1;
  }
  return {c0, c1, c2, c3};
}

// 16 bits of element `index`: eight neighbouring indices share one Philox block.
HALFBYTE_HD inline uint32_t random16(const Philox& p, uint32_t index) {
  const uint32_t low = index & 2u ? p.word1 : p.word0, high = index & 2u ? p.word3 : p.word2;
  return ((index & 4u ? high : low) >> (16 * (index & 1u))) & 0xFFFFu;
}

}  // namespace
}  // namespace halfbyte
