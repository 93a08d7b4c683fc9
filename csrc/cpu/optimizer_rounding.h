// Stochastic rounding of updated bf16 and fp16 parameters: x goes up to the next magnitude with the probability of its
// distance from the one below, by 16 random bits that depend on (seed, step, global element index) alone.
// Included once per ISA, after optimizer_simd_<isa>.h.
#pragma once

#include "../philox.h"
#include "optimizer.h"
#include "simd/scalar.h"

namespace halfbyte::cpu::optimizer {
namespace {

constexpr int kPhiloxVectors = 2;  // at a time: a round waits for its products
constexpr int kRandoms = 8 * kPhiloxLanes * kPhiloxVectors;  // eight neighbours share one Philox block

// random16 of the elements [8 * counter, 8 * counter + kRandoms): philox() for neighbouring counters, one in each 64-bit lane.
// Upper halves are not kept clean: products read the lower ones alone.
inline void fill_randoms(uint64_t counter, uint32_t step, uint64_t seed, uint16_t (&random)[kRandoms]) {
  Wides c0[kPhiloxVectors], c1[kPhiloxVectors], c2[kPhiloxVectors], c3[kPhiloxVectors];
  for (int v = 0; v < kPhiloxVectors; ++v) {
    c0[v] = wide_count(counter + uint64_t(v * kPhiloxLanes));
    c1[v] = wide_upper(c0[v]);
    c2[v] = wide_splat(step);
    c3[v] = wide_splat(0);
  }
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxKey0, k1 += kPhiloxKey1) {
#pragma GCC unroll 2
    for (int v = 0; v < kPhiloxVectors; ++v) {
      const Wides p0 = wide_multiply(c0[v], wide_splat(kPhiloxFactor0)), p1 = wide_multiply(c2[v], wide_splat(kPhiloxFactor1));
      c0[v] = wide_xor(wide_upper(p1), c1[v], wide_splat(k0));
      c2[v] = wide_xor(wide_upper(p0), c3[v], wide_splat(k1));
      c1[v] = p1;
      c3[v] = p0;
    }
  }
  for (int v = 0; v < kPhiloxVectors; ++v)
    wide_store_by_turns(random + 8 * kPhiloxLanes * v, wide_pack(c0[v], c1[v]), wide_pack(c2[v], c3[v]));
}

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

// x[0..count) -> out; element i has the global index first + i.
template <class T>
inline void round_stochastic(const float* x, int64_t count, uint64_t first, uint64_t seed, uint32_t step, T* out) {
  alignas(64) uint16_t random[kRandoms];
  for (int64_t i = 0; i < count;) {
    const uint64_t index = first + uint64_t(i);
    fill_randoms(index / 8, step, seed, random);
    const int64_t used = int64_t(index % 8), n = count - i < kRandoms - used ? count - i : kRandoms - used;
    for (int64_t j = 0; j < n; ++j) round_to(x[i + j], random[used + j], out + i + j);
    i += n;
  }
}

}  // namespace
}  // namespace halfbyte::cpu::optimizer
