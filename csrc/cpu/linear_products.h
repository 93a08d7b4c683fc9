// Lists of the arithmetics that linear's kernels have in one ISA. Included once per ISA; isa_<name>.cpp declares the lists.
//
// `DirectProducts` are those of `direct`, `Products` those of everything else; the last of both is Float32, which takes what no other is
// meant for. An arithmetic is a type, `Product` in the kernels, declared in linear_decode_<isa>.h, linear_bfloat16_avx512.h or
// linear_int16_avx2.h:
//   kCompute             its name at run time
//   kBFloat16By4Bit      of bf16 tokens by 4-bit codes only: its kernels would be wrong for others
//   kDirectTokens        up to this M `direct` is faster than `tiled`
//   kTurnedFrom          when `turned` is; on tiles ColumnLayout says it
//   kUnitElements        elements in a unit, of type Element
//   kVectors             vectors of decoded values in a group, of type Values
//   Sum                  a vector of sums, with load_sums and store_sums
//   load, broadcast      a vector of prepared units; one unit in all lanes
//   multiply_add         sum + a * b
#pragma once

#include "linear_kernels.h"

namespace halfbyte::cpu {
namespace {

// The line of p to L1, or to L2. The asm is none, but counts as an effect: GCC drops calls of functions that do nothing but prefetch.
inline void prefetch(const void* p) {
  __builtin_prefetch(p, 0, 3);
  asm volatile("" : :);
}
inline void prefetch_l2(const void* p) {
  __builtin_prefetch(p, 0, 2);
  asm volatile("" : :);
}

template <class... Product>
struct ProductList {};

// body(Product{}) for each.
template <class... Product, class Body>
constexpr void for_each_product(ProductList<Product...>, const Body& body) {
  (body(Product{}), ...);
}

// body(Product{}) for the one that `compute` names, else for the last.
template <class First, class... Rest, class Body>
inline void with_product(ProductList<First, Rest...>, Compute compute, const Body& body) {
  if constexpr (sizeof...(Rest) == 0) body(First{});
  else if (compute == First::kCompute) body(First{});
  else with_product(ProductList<Rest...>{}, compute, body);
}

// body.operator()<count>(), for 1 to MOST.
template <int MOST, class Body>
inline void with_count(int64_t count, const Body& body) {
  if constexpr (MOST > 0) {
    if (count == MOST) body.template operator()<MOST>();
    else with_count<MOST - 1>(count, body);
  }
}

}  // namespace
}  // namespace halfbyte::cpu
