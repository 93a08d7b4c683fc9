// The class of a normalized moment (dynamic_map.h) on vectors too short for tables of 16: a guess by the logarithm, and a
// comparison with the guess's exact boundary.
// Included at the end of optimizer_simd_<isa>.h.
#pragma once

namespace halfbyte::cpu::optimizer {
namespace {

class Class {
 public:
  Class(const DynamicMap& map, Floats a) {
    const Ints guess = class_guess(a, map.guess_offset);
    index_ = add_if_greater(guess, a, lookup8(map.above, guess));
  }
  Floats J(const DynamicMap& map) const { return lookup8(map.J, index_); }
  Floats P(const DynamicMap& map) const { return lookup8(map.P, index_); }

 private:
  Ints index_;
};

}  // namespace
}  // namespace halfbyte::cpu::optimizer
