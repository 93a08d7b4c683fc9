// The class of a normalized moment (dynamic_map.h) on vectors too short for tables of 16: a guess by the logarithm, and a
// comparison with the guess's exact boundary.
// Included at the end of optimizer_simd_<isa>.h.
#pragma once

namespace halfbyte::cpu::optimizer {
namespace {

// guess(product) of a moment and its block's factor, then correct(), which other vectors' steps may come between.
template <bool SIGNED>
class Class {
 public:
  void guess(Floats product) {
    magnitude_ = SIGNED ? from_bits(bit_and(bits(product), splat_bits(0x7FFFFFFFu))) : product;
    index_ = class_guess(magnitude_, kMap.guess_offset);
  }
  void correct() { index_ = add_if_greater(index_, magnitude_, lookup8(kMap.above, index_)); }
  Floats magnitude() const { return magnitude_; }
  Floats J() const { return lookup8(kMap.J, index_); }
  // x * P + offset, for x whose exponent has room. The product is exact: P is 2^class, added to x's exponent.
  Floats scaled(Floats x, float offset) const { return add(from_bits(add_ints(bits(x), shift_left<23>(index_))), splat(offset)); }

 private:
  static constexpr const DynamicMap& kMap = SIGNED ? kSignedMap : kUnsignedMap;
  Floats magnitude_;
  Ints index_;
};

}  // namespace
}  // namespace halfbyte::cpu::optimizer
