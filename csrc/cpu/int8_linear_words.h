// Integer products without VNNI: codes widened to int16, vpmaddwd adds pairs of exact products (2 * 127 * 128 fits easily).
// vpmaddubsw would take bytes, but saturates its pairs at 2^15. Included once per ISA, after linear_decode_<isa>.h and
// int8_vectors_<isa>.h.
#pragma once

#include "int8_products.h"

namespace halfbyte::cpu {
namespace {

// Along K: a vector of widened weights a step.
struct Int8Dot : Int8Vectors {
  static constexpr int kStep = kBytes / 2;
  static constexpr int kWeightOffset = 0;
  using Code = int16_t;
  static Values weights(const uint8_t* codes) { return widened(codes); }
  static Sum multiply_add(Values w, const Code* x, Sum sum) { return sum + multiply_words(w, load_bytes(x)); }
};

// linear's micro-kernel on units of 2 codes as int16.
struct Int8Units : Int8Vectors {
  static constexpr int kUnitElements = 2;
  static Sum multiply_add(Values weight, Values x, Sum sum) { return sum + multiply_words(weight, x); }
  // A vector of a token's units.
  static Vector activations(const uint8_t* codes) { return as_units(widened(codes)); }
  // 2 * count codes, widened, vectors of kLanes units kStep floats apart, the last one filled up with zeros; returns 0: nothing is
  // offset.
  template <int64_t kStep>
  static int32_t weights(const uint8_t* codes, int64_t count, float* units) {
    int64_t u = 0;
    for (; u + kLanes <= count; u += kLanes, units += kStep) store_bytes(units, widened(codes + 2 * u));
    if (u < count) {
      uint8_t left[2 * kLanes] = {};
      memcpy(left, codes + 2 * u, size_t(2 * (count - u)));
      store_bytes(units, widened(left));
    }
    return 0;
  }
};

}  // namespace
}  // namespace halfbyte::cpu
