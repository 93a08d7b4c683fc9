// Stochastic rounding of updated bf16 and fp16 parameters: x goes up to the next magnitude with the probability of its
// distance from the one below, by 16 random bits that depend on (seed, step, global element index) alone.
// Included once per ISA.
#pragma once

#include "optimizer.h"
#include "random.h"
#include "simd/scalar.h"

namespace halfbyte::cpu::optimizer {
namespace {

// Up when fraction(x / spacing) + random / 65536 >= 1; NaN and Inf as with rounding to nearest.
inline void round_to(float x, uint32_t random, BFloat16* out) {
  const uint32_t b = float_bits(x), magnitude = b & 0x7FFFFFFFu;
  const uint32_t quiet = magnitude > 0x7F800000u ? 0x40u : 0u;
  out->bits = uint16_t(magnitude < 0x7F800000u ? (b + random) >> 16 : b >> 16 | quiet);
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

// Two vectors at once, where an ISA has a way to (optimizer_simd_<isa>.h) and they are finite. False: nothing is stored.
template <class T>
inline bool store_pair_up(T*, Floats, Floats, const uint16_t*) {
  return false;
}

// x[0..count) -> out; element i has the global index first + i.
template <class T>
inline void round_stochastic(const float* x, int64_t count, uint64_t first, uint64_t seed, uint32_t step, T* out) {
  alignas(64) uint16_t random[kRandoms];
  for (int64_t i = 0; i < count;) {
    const uint64_t index = first + uint64_t(i);
    const int64_t used = int64_t(index % 8), n = count - i < kRandoms - used ? count - i : kRandoms - used;
    fill_randoms(index / 8, step, seed, used + n, random);
    int64_t j = 0;
    while (j + 2 * kWidth <= n && store_pair_up(out + i + j, load(x + i + j), load(x + i + j + kWidth), random + used + j)) j += 2 * kWidth;
    for (; j < n; ++j) round_to(x[i + j], random[used + j], out + i + j);
    i += n;
  }
}

}  // namespace
}  // namespace halfbyte::cpu::optimizer
