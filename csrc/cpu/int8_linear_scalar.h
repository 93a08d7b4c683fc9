// Integer products in plain C++. Included once per ISA, after linear_decode_scalar.h.
#pragma once

#include "simd/scalar.h"

namespace halfbyte::cpu {
namespace {

typedef int32_t IntVector __attribute__((vector_size(16)));

// Along K: 16 weights a step.
struct Int8Dot {
  static constexpr int kStep = 16;
  static constexpr int kWeightOffset = 0;
  using Code = int16_t;
  using Values = const int8_t*;
  using Sum = int32_t;
  static Sum zero() { return 0; }
  static Values weights(const uint8_t* codes) { return reinterpret_cast<const int8_t*>(codes); }
  static Sum multiply_add(Values w, const Code* x, Sum sum) {
    for (int i = 0; i < kStep; ++i) sum += int32_t(w[i]) * x[i];
    return sum;
  }
  static int32_t total(Sum sum) { return sum; }
  static void totals(const Sum sums[4], int32_t out[4]) { memcpy(out, sums, 4 * sizeof *out); }
};

// linear's micro-kernel on units of one code as int32.
struct Int8Units {
  static constexpr int kUnitElements = 1;
  using Values = IntVector;
  using Sum = IntVector;
  static Sum load_sums(const float* p) { return load(p); }
  static void store_sums(float* p, Sum v) { memcpy(p, &v, sizeof v); }
  static Values load(const float* p) {
    IntVector v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static Values broadcast(const float* p) {
    int32_t unit;
    memcpy(&unit, p, 4);
    return IntVector{unit, unit, unit, unit};
  }
  static Sum multiply_add(Values weight, Values x, Sum sum) { return sum + weight * x; }
  // A vector of a token's units.
  static Vector activations(const uint8_t* codes) {
    const IntVector units = {int8_t(codes[0]), int8_t(codes[1]), int8_t(codes[2]), int8_t(codes[3])};
    Vector v;
    memcpy(&v, &units, sizeof v);
    return v;
  }
  // Returns 0: nothing is offset.
  template <int64_t kStep>
  static int32_t weights(const uint8_t* codes, int64_t count, float* units) {
    static_assert(kStep == kLanes);
    for (int64_t u = 0; u < count; ++u) {
      const int32_t code = int8_t(codes[u]);
      memcpy(units + u, &code, 4);
    }
    return 0;
  }
};

}  // namespace
}  // namespace halfbyte::cpu
