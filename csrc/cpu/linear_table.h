// Run-time arguments -> instances of linear's kernels, and their table. Included once per ISA.
#pragma once

#include "linear_backward.h"
#include "linear_backward_direct.h"
#include "linear_turned.h"

namespace halfbyte::cpu {
namespace {

template <Codes value>
struct CodesTag {
  static constexpr Codes kCodes = value;
};

// body(Product{}, CodesTag<codes>{}) for the arithmetic among `List` and the format.
template <class List, class Body>
inline void with_product_and_codes(Compute compute, const RowLayout& l, const Body& body) {
  with_product(List{}, compute, [&]<class P>(P product) {
    if constexpr (!P::kBFloat16By4Bit) {
      if (l.format == kInt8) return body(product, CodesTag<Codes::kInt8>{});
      if (l.format == kFP8) return body(product, CodesTag<Codes::kFP8>{});
    }
    if (l.block_size == 32) body(product, CodesTag<Codes::kFourBit32>{});
    else body(product, CodesTag<Codes::kFourBit>{});
  });
}

// body(const T*) for the element type, of those that the arithmetic has.
template <class Product, class Body>
inline void with_input(const void* input, DType dtype, const Body& body) {
  if constexpr (Product::kBFloat16By4Bit) body(static_cast<const BFloat16*>(input));
  else with_elements(input, dtype, body);
}

void linear_prepare_direct(const void* input, DType dtype, int64_t tokens, const RowLayout& l, Compute compute, void* units) {
  with_product_and_codes<DirectProducts>(compute, l, [&]<class P, class C>(P, C) {
    with_input<P>(input, dtype, [&]<class T>(const T* x) { pack_direct<P, C::kCodes>(x, tokens, l, units); });
  });
}

void linear_prepare_tiled(const void* input, DType dtype, int64_t tokens, const RowLayout& l, Compute compute, int64_t tile_begin,
                          int64_t tile_end, void* units) {
  with_product_and_codes<Products>(compute, l, [&]<class P, class C>(P, C) {
    const auto pack = [&]<class T>(const T* x) { pack_tiled<P, C::kCodes>(x, tokens, l, tile_begin, tile_end, units); };
    if constexpr (P::kUnitElements == 2) pack(static_cast<const BFloat16*>(input));  // pairs are made of bf16 alone
    else with_input<P>(input, dtype, pack);
  });
}

void linear_direct(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& l, Compute compute, const void* units,
                   int64_t tokens, const LowRank* low_rank, const LinearOutput& output) {
  with_product_and_codes<DirectProducts>(compute, l, [&]<class P, class C>(P, C) {
    constexpr Codes codes = C::kCodes;
    with_count<kOnTiles<P> ? 0 : kPassTokens>(
        tokens, [&]<int M>() { direct<P, codes, M>(packed, row_begin, row_end, l, units, low_rank, output); });
  });
}

void linear_tiled(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& l, Compute compute, const void* units,
                  int64_t tokens, const LowRank* low_rank, const LinearOutput& output, void* scratch) {
  with_product_and_codes<Products>(compute, l, [&]<class P, class C>(P, C) {
    tiled<P, C::kCodes>(packed, row_begin, row_end, l, units, tokens, low_rank, output, scratch);
  });
}

void linear_turned(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& l, Compute compute,
                   const TokenUnits& input, int64_t tokens, const LowRank* low_rank, const LinearOutput& output, void* scratch) {
  with_product_and_codes<Products>(compute, l, [&]<class P, class C>(P, C) {
    turned<P, C::kCodes>(packed, row_begin, row_end, l, input, tokens, low_rank, output, scratch);
  });
}

int64_t linear_turned_scratch(Compute compute, int64_t tokens, int64_t rows, int64_t in_features) {
  int64_t floats = 0;
  with_product(Products{}, compute, [&]<class P>(P) { floats = turned_scratch_floats<P>(tokens, rows, in_features); });
  return 4 * floats;
}

void linear_backward(const uint8_t* packed, int64_t rows, int64_t group_begin, int64_t group_end, const RowLayout& l, Compute compute,
                     const TokenUnits& grad, int64_t tokens, const LowRank* low_rank, const LinearOutput& output, void* scratch) {
  with_product_and_codes<Products>(compute, l, [&]<class P, class C>(P, C) {
    backward<P, C::kCodes>(packed, rows, group_begin, group_end, l, grad, tokens, low_rank, output, scratch);
  });
}

int64_t linear_backward_scratch(Compute compute, int64_t tokens, int64_t rows, int64_t groups, int64_t rank) {
  int64_t floats = 0;
  with_product(Products{}, compute, [&]<class P>(P) { floats = backward_scratch_floats<P>(tokens, rows, groups, rank); });
  return 4 * floats;
}

void linear_backward_direct(const uint8_t* packed, int64_t rows, int64_t group_begin, int64_t group_end, const RowLayout& l,
                            Compute compute, const void* grad, DType dtype, int64_t grad_stride, int64_t tokens, float* sums,
                            int64_t sums_stride) {
  with_product_and_codes<Products>(compute, l, [&]<class P, class C>(P, C) {
    with_count<kOnTiles<P> ? 0 : kPassTokens>(tokens, [&]<int M>() {
      backward_direct<M, P, C::kCodes>(packed, rows, group_begin, group_end, l, grad, dtype, grad_stride, sums, sums_stride);
    });
  });
}

void linear_finish_backward(const float* sums, int64_t slices, int64_t tokens, int64_t sums_stride, int64_t group_begin,
                            int64_t group_end, const RowLayout& l, Compute compute, const LowRank* low_rank,
                            const LinearOutput& output) {
  with_product_and_codes<Products>(compute, l, [&]<class P, class C>(P, C) {
    finish_backward<P, C::kCodes>(sums, slices, tokens, sums_stride, group_begin, group_end, l, low_rank, output);
  });
}

// body(Product{}, const T*) for the arithmetic and the element type.
template <class Body>
inline void with_operand(Compute compute, const void* matrix, DType dtype, const Body& body) {
  with_product(Products{}, compute, [&]<class P>(P product) {
    with_input<P>(matrix, dtype, [&]<class T>(const T* x) { body(product, x); });
  });
}

void linear_prepare_matrix(const void* matrix, DType dtype, int64_t tokens, int64_t columns, Compute compute, int64_t begin, int64_t end,
                           void* units) {
  with_operand(compute, matrix, dtype, [&]<class P, class T>(P, const T* x) { pack_matrix<P>(x, tokens, columns, begin, end, units); });
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
  LinearKernels k{};
  int64_t scratch = 0;
  for_each_product(Products{}, [&]<class P>(P) {
    using C = ColumnLayout<P>;
    k.arithmetic[int(P::kCompute)] = {.any_tokens = true,
                                      .block_rows = Layout<P>::kBlockRows,
                                      .turned_rows = int32_t(C::kRun),
                                      .matrix_tokens = C::kTokensTogether,
                                      .column_tokens = int32_t(C::kMostTokens),
                                      .matrix_units = int32_t(kUnitMultiple<P>),
                                      .packed_units = C::kPackedUnits,
                                      // on tiles as measured on a Xeon with AMX (csrc/README.md)
                                      .decoding_tokens = kOnTiles<P> ? 40 : kDecodingTokens,
                                      .column_decoding = kOnTiles<P> ? 32 : kDecodingTokens,
                                      .sharing_rows = kOnTiles<P> ? 80 : kSharingRows,
                                      .turned_from = C::kTurnedFrom,
                                      .direct_tokens = 0};
    constexpr int64_t forward = Layout<P>::kMany.floats() + Layout<P>::kSumsFloats;
    scratch = forward > scratch ? forward : scratch;
    // On the CPU with AMX that was measured (csrc/README.md) a vdpbf16ps takes as long as four multiply-adds in fp32; past 4
    // tokens tiles are faster.
    if (kOnTiles<P>) k.exact_tokens = kPassTokens;
  });
  for_each_product(DirectProducts{}, [&]<class P>(P) {
    k.arithmetic[int(P::kCompute)].direct_tokens = kOnTiles<P> ? 0 : P::kDirectTokens;
  });
  k.group = kGroup;
  k.lanes = kLanes;
  k.tile_tokens = kTileTokens;
  k.scratch_bytes = 4 * scratch;
  k.prepare_direct = linear_prepare_direct;
  k.direct = linear_direct;
  k.prepare_tiled = linear_prepare_tiled;
  k.tiled = linear_tiled;
  k.prepare_matrix = linear_prepare_matrix;
  k.turned = linear_turned;
  k.turned_scratch = linear_turned_scratch;
  k.backward = linear_backward;
  k.backward_scratch = linear_backward_scratch;
  k.backward_direct = linear_backward_direct;
  k.finish_backward = linear_finish_backward;
  k.prepare_low_rank = linear_prepare_low_rank;
  k.prepare_low_rank_tiled = linear_prepare_low_rank_tiled;
  return k;
}

}  // namespace
}  // namespace halfbyte::cpu
