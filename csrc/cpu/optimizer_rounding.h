// Stochastic rounding of updated bf16 and fp16 parameters: x goes up to the next magnitude with the probability of its
// distance from the one below, by 16 random bits that depend on (seed, step, global element index) alone.
#pragma once

#include "../philox.h"
#include "optimizer.h"
#include "simd/scalar.h"

namespace halfbyte::cpu::optimizer {
namespace {

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
    round_to(x[i], random16(random, uint32_t(index % 8)), out + i);
  }
}

}  // namespace
}  // namespace halfbyte::cpu::optimizer
