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

void dropout_mask(uint64_t seed, uint32_t dropped, int64_t begin, int64_t end, uint8_t* mask) {
  constexpr int kBytes = kRandoms / 8;
  alignas(64) uint16_t random[kRandoms];
  uint8_t bits[kBytes];
  for (int64_t b = begin; b < end; b += kBytes) {
    fill_randoms(uint64_t(b), kDropoutStep, seed, random);
    for (int v = 0; v < kPhiloxVectors; ++v)
      store_at_least(random + 8 * kPhiloxLanes * v, dropped, bits + kPhiloxLanes * v);
    memcpy(mask + b, bits, size_t(end - b < kBytes ? end - b : kBytes));
  }
}

}  // namespace
}  // namespace halfbyte::cpu
