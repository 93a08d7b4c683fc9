// The class of a normalized moment (dynamic_map.h) on vectors too short for tables of 16: a guess by the logarithm, and a
// comparison with the guess's exact boundary.
// Included at the end of optimizer_simd_<isa>.h.
#pragma once

namespace halfbyte::cpu::optimizer {
namespace {

template <bool SIGNED>
class Class {
 public:
  explicit Class(Floats a) {
    const Ints guess = class_guess(a, kMap.guess_offset);
    index_ = add_if_greater(guess, a, lookup8(kMap.above, guess));
  }
  Floats J() const { return lookup8(kMap.J, index_); }
  Floats P() const { return lookup8(kMap.P, index_); }

 private:
  static constexpr const DynamicMap& kMap = SIGNED ? kSignedMap : kUnsignedMap;
  Ints index_;
};

}  // namespace
}  // namespace halfbyte::cpu::optimizer
