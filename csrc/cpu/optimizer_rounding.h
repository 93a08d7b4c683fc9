// Stochastic rounding of updated bf16 and fp16 parameters: x goes up to the next magnitude with the probability of its
// distance from the one below, by 16 random bits that depend on (seed, step, global element index) alone.
#pragma once

#include "optimizer.h"
#include "simd/scalar.h"

namespace halfbyte::cpu::optimizer {
namespace {

// Philox 4x32-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405).
struct Philox {
  uint32_t word[4];
};
inline Philox philox(uint64_t counter, uint32_t step, uint64_t seed) {
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = step, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Up when fraction(x / spacing) + random / 65536 >= 1; NaN and Inf as with rounding to nearest.
inline void round_to(float x, uint32_t random, BFloat16* out) {
  const uint32_t b = float_bits(x);
  *out = (b & 0x7F800000u) == 0x7F800000u ? from_float<BFloat16>(x) : BFloat16{uint16_t((b + random) >> 16)};
}
inline void round_to(float x, uint32_t random, Float16* out) {
  const uint32_t b = float_bits(x), magnitude = b & 0x7FFFFFFFu;
  const uint16_t sign = uint16_t((b >> 16) & 0x8000u);
  if (magnitude >= 0x47800000u) {  // 65536 and above, Inf, NaN
    *out = from_float<Float16>(x);
  } else if (magnitude >= 0x38800000u) {  // normal: the lower 13 bits are the fraction
    const uint32_t up = magnitude + (random >> 3);
    *out = {uint16_t(sign | ((up - 0x38000000u) >> 13))};  // a carry out of the largest finite value gives Inf
  } else {  // subnormal: multiples of 2^-24
    const float y = bits_float(magnitude) * 0x1p24f;
    const uint32_t below = uint32_t(y);
    const uint32_t fraction = uint32_t((y - float(below)) * 65536.0f);
    *out = {uint16_t(sign | (below + (fraction + random >= 65536u)))};
  }
}
inline void round_to(float x, uint32_t, float* out) { *out = x; }

// x[0..count) -> out; element i has the global index first + i. Eight neighbours share one Philox block.
template <class T>
inline void round_stochastic(const float* x, int64_t count, uint64_t first, uint64_t seed, uint32_t step, T* out) {
  Philox random{};
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t index = first + uint64_t(i);
    if (i == 0 || index % 8 == 0) random = philox(index / 8, step, seed);
    round_to(x[i], (random.word[index % 8 / 2] >> (index % 2 * 16)) & 0xFFFFu, out + i);
  }
}

}  // namespace
}  // namespace halfbyte::cpu::optimizer
