// The class of a normalized moment (dynamic_map.h) by pairs of binades: one look-up and a carry in the place of a guess and a
// comparison, for vectors that hold tables of 16. Included at the end of optimizer_simd_avx512.h.
#pragma once

#include <bit>

namespace halfbyte::cpu::optimizer {
namespace {

// Indexed by bits 24 to 27 of a float from 2^-29 to below 8. A pair holds one boundary of classes at most, and what lies above it has
// the class that the next pair starts with: adding `step` to the float's bits carries it there.
struct alignas(64) ClassPairs {
  uint32_t step[16];
  float J[16], P[16];  // of the class that the pair starts with

  constexpr explicit ClassPairs(const DynamicMap& map) : step(), J(), P() {
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t start = (i == 0 ? 0x40u : 0x30u + i) << 24;  // 2.0 is where values of class 7 are carried to
      int c = 0;
      while (std::bit_cast<float>(start) > map.above[c]) ++c;
      const uint32_t boundary = std::bit_cast<uint32_t>(map.above[c]);
      step[i] = boundary >> 24 == start >> 24 ? (1u << 24) - (boundary & 0xFFFFFFu) - 1 : 0;
      J[i] = map.J[c], P[i] = map.P[c];
    }
  }
};

// What is smaller than the first pair has its class, and becomes its first number: in class 0 either is far below the first step.
template <bool SIGNED>
class Class {
 public:
  void guess(Floats product) {
    const Floats least = splat(0x1p-29f);
    bits_ = bits(SIGNED ? larger_magnitude(product, least) : maximum(product, least));
    step_ = bits(in_turn(_mm512_permutexvar_ps(shift_right<24>(bits_), _mm512_load_ps(kPairs.step))));
  }
  void correct() { index_ = shift_right<24>(add_ints(bits_, step_)); }
  Floats magnitude() const { return from_bits(bits_); }
  Floats J() const { return _mm512_permutexvar_ps(index_, _mm512_load_ps(kPairs.J)); }
  Floats scaled(Floats x, float offset) const {
    return fma(x, _mm512_permutexvar_ps(index_, _mm512_load_ps(kPairs.P)), splat(offset));
  }

 private:
  static constexpr ClassPairs kPairs{SIGNED ? kSignedMap : kUnsignedMap};
  Ints bits_, step_, index_;
};

}  // namespace
}  // namespace halfbyte::cpu::optimizer
