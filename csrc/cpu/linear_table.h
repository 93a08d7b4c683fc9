// Run-time arguments -> instances of linear's kernels, and their table. Included once per ISA.
#pragma once

#include "linear_backward.h"

namespace halfbyte::cpu {
namespace {

template <Codes value>
struct CodesTag {
  static constexpr Codes kCodes = value;
};

// body(Product{}, CodesTag<codes>{}) for the format and the arithmetic.
template <class Product, class Body>
inline void with_codes(const RowLayout& l, const Body& body) {
  if (l.format == kInt8) body(Product{}, CodesTag<Codes::kInt8>{});
  else if (l.format == kFP8) body(Product{}, CodesTag<Codes::kFP8>{});
  else if (l.block_size == 32) body(Product{}, CodesTag<Codes::kFourBit32>{});
  else body(Product{}, CodesTag<Codes::kFourBit>{});
}
template <class Body>
inline void with_product(Compute compute, const RowLayout& l, const Body& body) {
  if (kHasBFloat16 && compute == Compute::kBFloat16) with_codes<BFloat16Pairs>(l, body);
  else with_codes<Float32>(l, body);
}

// The same for `direct`, which has one more.
template <class Body>
inline void with_direct_product(Compute compute, const RowLayout& l, const Body& body) {
  if constexpr (kInt16Tokens > 0) {
    if (compute == Compute::kInt16) {
      if (l.block_size == 32) body(Int16{}, CodesTag<Codes::kFourBit32>{});
      else body(Int16{}, CodesTag<Codes::kFourBit>{});
      return;
    }
  }
  with_product(compute, l, body);
}

// body(const T*) for the element type.
template <class Body>
inline void with_input(const void* input, DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32: body(static_cast<const float*>(input)); break;
    case DType::kBFloat16: body(static_cast<const BFloat16*>(input)); break;
    case DType::kFloat16: body(static_cast<const Float16*>(input)); break;
  }
}

// Most tokens that `direct` takes in the arithmetic of a product.
template <class Product>
constexpr int kMostDirectTokens = kOnTiles<Product>                  ? 0
                                  : std::is_same_v<Product, Int16>   ? kInt16Tokens
                                  : std::is_same_v<Product, Float32> ? kDirectTokens[0]
                                                                     : kDirectTokens[1];

// body.operator()<tokens>(), for 1 to MOST tokens.
template <int MOST, class Body>
inline void with_tokens(int64_t tokens, const Body& body) {
  if constexpr (MOST > 0) {
    if (tokens == MOST) body.template operator()<MOST>();
    else with_tokens<MOST - 1>(tokens, body);
  }
}

void linear_prepare_direct(const void* input, DType dtype, int64_t tokens, const RowLayout& l, Compute compute, void* units) {
  with_direct_product(compute, l, [&]<class P, class C>(P, C) {
    if constexpr (std::is_same_v<P, Int16>) pack_direct(P{}, static_cast<const BFloat16*>(input), tokens, l, units);
    else with_input(input, dtype, [&]<class T>(const T* x) { pack_direct<P, C::kCodes>(x, tokens, l, units); });
  });
}

void linear_prepare_tiled(const void* input, DType dtype, int64_t tokens, const RowLayout& l, Compute compute, int64_t tile_begin,
                          int64_t tile_end, void* units) {
  with_product(compute, l, [&]<class P, class C>(P, C) {
    with_input(input, dtype, [&]<class T>(const T* x) { pack_tiled<P, C::kCodes>(x, tokens, l, tile_begin, tile_end, units); });
  });
}

void linear_direct(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& l, Compute compute, const void* units,
                   int64_t tokens, const LowRank* low_rank, const LinearOutput& output) {
  with_direct_product(compute, l, [&]<class P, class C>(P, C) {
    constexpr Codes codes = C::kCodes;
    with_tokens<kMostDirectTokens<P>>(
        tokens, [&]<int M>() { direct<P, codes, M>(packed, row_begin, row_end, l, units, low_rank, output); });
  });
}

void linear_tiled(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& l, Compute compute, const void* units,
                  int64_t tokens, const LowRank* low_rank, const LinearOutput& output, void* scratch) {
  with_product(compute, l, [&]<class P, class C>(P, C) {
    tiled<P, C::kCodes>(packed, row_begin, row_end, l, units, tokens, low_rank, output, scratch);
  });
}

void linear_backward(const uint8_t* packed, int64_t rows, int64_t group_begin, int64_t group_end, const RowLayout& l, Compute compute,
                     const void* grad, int64_t grad_stride, int64_t tokens, const LowRank* low_rank, const LinearOutput& output,
                     void* scratch) {
  with_product(compute, l, [&]<class P, class C>(P, C) {
    backward<P, C::kCodes>(packed, rows, group_begin, group_end, l, grad, grad_stride, tokens, low_rank, output, scratch);
  });
}

// body(Product{}, const T*) for the arithmetic and the element type.
template <class Body>
inline void with_operand(Compute compute, const void* matrix, DType dtype, const Body& body) {
  with_input(matrix, dtype, [&]<class T>(const T* x) {
    if (kHasBFloat16 && compute == Compute::kBFloat16) body(BFloat16Pairs{}, x);
    else body(Float32{}, x);
  });
}

void linear_prepare_rows(const void* matrix, DType dtype, int64_t tokens, int64_t columns, Compute compute, int64_t begin, int64_t end,
                         void* units) {
  with_operand(compute, matrix, dtype, [&]<class P, class T>(P, const T* x) { pack_rows<P>(x, tokens, columns, begin, end, units); });
}

void linear_prepare_low_rank(const void* matrix, DType dtype, int64_t rows, int64_t columns, float factor, Compute compute,
                             int64_t offset, int64_t stride, void* units) {
  with_operand(compute, matrix, dtype, [&]<class P, class T>(P, const T* x) {
    pack_low_rank<P>(x, rows, columns, factor, offset, stride, units);
  });
}

void linear_prepare_low_rank_tiled(const void* matrix, DType dtype, int64_t tokens, int64_t rank, float factor, Compute compute,
                                   void* units) {
  with_operand(compute, matrix, dtype, [&]<class P, class T>(P, const T* x) {
    pack_low_rank_tiled<P>(x, tokens, rank, factor, units);
  });
}

constexpr LinearKernels linear_kernels() {
  static_assert(Layout<Float32>::kPanelStride >= Layout<BFloat16Pairs>::kPanelStride);
  constexpr int64_t forward = kPanelRows * (Layout<Float32>::kPanelStride + kSumsStride);
  constexpr int64_t reverse = kBackwardMany.scratch_floats(kLinearTokens);
  static_assert(kBackwardFew.scratch_floats(kFewTokens) <= reverse);
  LinearKernels k{};
  k.has_bfloat16 = kHasBFloat16;
  k.group = kGroup;
  k.lanes = kLanes;
  k.tile_tokens = kTileVectors * kLanes;
  k.block_rows[0] = Layout<Float32>::kBlockRows;
  k.block_rows[1] = Layout<BFloat16Pairs>::kBlockRows;
  k.unit_multiple[0] = kUnitMultiple<Float32>;
  k.unit_multiple[1] = kUnitMultiple<BFloat16Pairs>;
  k.direct_tokens[0] = kMostDirectTokens<Float32>;
  k.direct_tokens[1] = kHasBFloat16 ? kMostDirectTokens<BFloat16Pairs> : 0;
  k.direct_tokens[2] = kInt16Tokens;
  // On the CPU with AMX that was measured (csrc/README.md) a vdpbf16ps takes as long as four multiply-adds in fp32; past 4 tokens
  // tiles are faster.
  k.exact_tokens = kOnTiles<BFloat16Pairs> ? 4 : 0;
  k.scratch_bytes = 4 * (forward > reverse ? forward : reverse);
  k.prepare_direct = linear_prepare_direct;
  k.direct = linear_direct;
  k.prepare_tiled = linear_prepare_tiled;
  k.tiled = linear_tiled;
  k.prepare_rows = linear_prepare_rows;
  k.backward = linear_backward;
  k.prepare_low_rank = linear_prepare_low_rank;
  k.prepare_low_rank_tiled = linear_prepare_low_rank_tiled;
  return k;
}

}  // namespace
}  // namespace halfbyte::cpu
