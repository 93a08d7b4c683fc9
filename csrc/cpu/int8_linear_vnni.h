// Integer products by VNNI: vpdpbusd adds 4 products of an unsigned and a signed byte to each int32, without saturation. Codes are
// signed on both sides, so one side is stored as code + 128 and the other side's sum, times 128, is taken off the result. Included once
// per ISA, after linear_decode_<isa>.h and int8_vectors_<isa>.h.
#pragma once

#include "int8_products.h"

namespace halfbyte::cpu {
namespace {

// Along K: a vector of weights a step, made unsigned (one exclusive or for all tokens).
struct Int8Dot : Int8Vectors {
  static constexpr int kStep = kBytes;
  static constexpr int kWeightOffset = 128;
  using Code = int8_t;
  static Values weights(const uint8_t* codes) { return load_bytes(codes) ^ splat_byte(0x80); }
  static Sum multiply_add(Values w, const Code* x, Sum sum) { return dot_unsigned_signed(sum, w, load_bytes(x)); }
};

// linear's micro-kernel on units of 4 codes; the activations are the unsigned side.
struct Int8Units : Int8Vectors {
  static constexpr int kUnitElements = 4;
  static Sum multiply_add(Values weight, Values x, Sum sum) { return dot_unsigned_signed(sum, x, weight); }
  // A vector of a token's units.
  static Vector activations(const uint8_t* codes) { return as_units(load_bytes(codes) ^ splat_byte(0x80)); }
  // 4 * count codes as they are, vectors of kLanes units kStep floats apart, the last one filled up with zeros; returns 128 times
  // their sum.
  template <int64_t kStep>
  static int32_t weights(const uint8_t* codes, int64_t count, float* units) {
    Sum sum{};
    const auto put = [&](Values w) {
      store_bytes(units, w);
      sum = dot_unsigned_signed(sum, splat_byte(128), w);
      units += kStep;
    };
    int64_t u = 0;
    for (; u + kLanes <= count; u += kLanes) put(load_bytes(codes + 4 * u));
    if (u < count) put(load_first_bytes(codes + 4 * u, 4 * (count - u)));
    return sum_of_lanes(sum);
  }
};

}  // namespace
}  // namespace halfbyte::cpu
