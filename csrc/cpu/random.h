// random16 (philox.h) of many elements at once, and masks of dropout. Included once per ISA.
#pragma once

#if defined(__AVX512F__)
#include "simd/philox_avx512.h"
#elif defined(__AVX2__)
#include "simd/philox_avx2.h"
#else
#include "simd/philox_scalar.h"
#endif

#include "../dropout.h"

namespace halfbyte::cpu {
namespace {

constexpr int kRandoms = 8 * kPhiloxLanes * kPhiloxVectors;  // eight neighbours share one Philox block

// random16 of the elements [8 * counter, 8 * (counter + kPhiloxLanes * VECTORS)): philox() for neighbouring counters, one in each
// 64-bit lane. Upper halves are not kept clean: products read the lower ones alone.
template <int VECTORS>
inline void fill_vectors(uint64_t counter, uint32_t step, uint64_t seed, uint16_t* random) {
  Wides c0[VECTORS], c1[VECTORS], c2[VECTORS], c3[VECTORS];
  for (int v = 0; v < VECTORS; ++v) {
    c0[v] = wide_count(counter + uint64_t(v * kPhiloxLanes));
    c1[v] = wide_upper(c0[v]);
    c2[v] = wide_splat(step);
    c3[v] = wide_splat(0);
  }
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxKey0, k1 += kPhiloxKey1) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const Wides p0 = wide_multiply(c0[v], wide_splat(kPhiloxFactor0)), p1 = wide_multiply(c2[v], wide_splat(kPhiloxFactor1));
      c0[v] = wide_xor(wide_upper(p1), c1[v], wide_splat(k0));
      c2[v] = wide_xor(wide_upper(p0), c3[v], wide_splat(k1));
      c1[v] = p1;
      c3[v] = p0;
    }
  }
  for (int v = 0; v < VECTORS; ++v)
    wide_store_by_turns(random + 8 * kPhiloxLanes * v, wide_pack(c0[v], c1[v]), wide_pack(c2[v], c3[v]));
}

// The first `count` of them, or more. One vector alone takes as long as two: its rounds wait for their products.
inline void fill_randoms(uint64_t counter, uint32_t step, uint64_t seed, int64_t count, uint16_t (&random)[kRandoms]) {
  constexpr int kHalf = kPhiloxVectors / 2;
  if (kHalf > 1 && count <= 8 * kPhiloxLanes * kHalf) fill_vectors<kHalf>(counter, step, seed, random);
  else fill_vectors<kPhiloxVectors>(counter, step, seed, random);
}

void dropout_mask(uint64_t seed, uint32_t dropped, int64_t begin, int64_t end, uint8_t* mask) {
  constexpr int kBytes = kRandoms / 8;
  alignas(64) uint16_t random[kRandoms];
  uint8_t bits[kBytes];
  for (int64_t b = begin; b < end; b += kBytes) {
    fill_randoms(uint64_t(b), kDropoutStep, seed, 8 * (end - b), random);
    for (int v = 0; v < kPhiloxVectors; ++v)
      store_at_least(random + 8 * kPhiloxLanes * v, dropped, bits + kPhiloxLanes * v);
    memcpy(mask + b, bits, size_t(end - b < kBytes ? end - b : kBytes));
  }
}

}  // namespace
}  // namespace halfbyte::cpu
