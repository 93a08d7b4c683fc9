// The entries of `linear` in the table of CPU kernels (kernels.h): raw pointers only, no torch.
//
// Legend: M tokens, N rows of the weight (out_features), K in_features. A *unit* is 4 bytes: one float, or two bf16 where
// the kernels multiply bf16 pairs. A *group* is the run of K that one decode step takes.
#pragma once

#include <stdint.h>

#include "../formats.h"

namespace halfbyte::cpu {

// How products are computed. Accumulation is fp32 in all.
enum class Compute : int32_t {
  kFloat32 = 0,   // decoded weights exact in fp32
  kBFloat16 = 1,  // decoded weights rounded to bf16, as in a dense bf16 layer; only where Kernels offer it
  kInt16 = 2,     // 4-bit codes and bf16 activations as int16: forward on direct_tokens, a low-rank part as kFloat32
};

// Where a result goes: (M, columns) elements of `dtype`, rows `stride` elements apart.
struct LinearOutput {
  void* data;
  const void* bias;  // (columns,) of `dtype`, added in fp32 before the one rounding; null: none
  int64_t stride;
  DType dtype;

  int64_t element_bytes() const { return dtype == DType::kFloat32 ? 4 : 2; }
  // What begins at so many rows and columns.
  LinearOutput from(int64_t row, int64_t column) const {
    const int64_t size = element_bytes();
    return {static_cast<char*>(data) + (row * stride + column) * size,
            bias ? static_cast<const char*>(bias) + column * size : nullptr, stride, dtype};
  }
};

// A low-rank addend in the arithmetic and the sums of the product itself, R more terms of each sum. Units as the product's.
//   forward:  + input (M, R) @ weight (N, R)^T      backward:  + input (M, R) @ weight (R, K)
struct LowRank {
  const void* weight;  // forward: prepare_low_rank's (N + kMostTileRows, stride); backward: its (R, stride), zeros past K
  const void* input;   // direct, turned: prepare_low_rank's (M, stride); backward: TokenUnits'; tiled: prepare_low_rank_tiled's
  bool as_it_lies;     // turned (always), backward: as TokenUnits'
  int64_t rank;        // R
  int64_t stride;      // units of a row of the weight; forward: zeros past R; direct and tiled: whole vectors; turned: matrix_units
};

// A matrix (M, units) that meets panels of decoded weights: prepare_matrix' units or, as it lies, the matrix itself, of which M rounded up
// to matrix_tokens rows may be read.
struct TokenUnits {
  const void* data;
  bool as_it_lies;
};

// When `turned` is faster than `tiled`, as measured: `turned_is_faster` of linear_driver.h.
struct TurnedFrom {
  static constexpr int32_t kNever = INT32_MAX;
  int32_t tokens;        // from so many on,
  int32_t rows;          // and one for so many rows of the weight, up to kLinearTokens
  int32_t widened_rows;  // the same for tokens that have to be widened to fp32; 0: never
  int32_t padding;       // or for any number of tokens that `tiled` pads with so many

  static constexpr TurnedFrom always() { return {0, INT32_MAX, INT32_MAX, 0}; }
};

// With all instruction sets but tiles, as measured on a Zen 4: a weight is decoded in the time of its products with so many tokens, and a
// token that another thread prepares is waited for and read in that of its products with so many rows. Lines come from other cores at
// one rate, whatever is in them: of narrower elements there are as many more as their products are faster.
constexpr int32_t kDecodingTokens = 8, kSharingRows = 48;

// What the kernels do in one arithmetic.
struct LinearArithmetic {
  bool any_tokens;          // `tiled`, `turned` and `backward` have it; the next ten are for them
  int32_t block_rows;       // rows of `tiled`'s micro-kernel; no thread should get a part of them
  int32_t turned_rows;      // rows of `turned`'s micro-kernel
  int32_t matrix_tokens;    // tokens of a prepared matrix that lie together; no thread should get a part of them
  int32_t column_tokens;    // the most tokens of a call of `turned` and `backward`
  int32_t matrix_units;     // a prepared matrix takes so many units for each token, or a multiple
  int32_t packed_units;     // a matrix of whole matrix_tokens and matrix_units is taken as it lies, unless it has a multiple of so many
  int32_t decoding_tokens;  // `tiled` decodes a weight in the time of multiplying it by so many tokens,
  int32_t column_decoding;  // `turned` and `backward` in that of so many
  int32_t sharing_rows;     // a token from another thread takes the time of multiplying it by so many rows or columns
  TurnedFrom turned_from;
  int32_t direct_tokens;    // up to this M the `direct` kernels are the faster ones; 0: they do not have it
};

struct LinearKernels {
  LinearArithmetic arithmetic[3];  // by Compute
  int32_t group;          // elements; prepared activations are padded with zeros to a multiple of it
  int32_t lanes;          // tokens in one vector; prepared tiles are padded to a multiple of it
  int32_t tile_tokens;    // tokens in one tile of prepare_tiled
  int32_t exact_tokens;   // up to this M products multiply exact fp32 weights whatever the input: that is faster, too
  int64_t scratch_bytes;  // what `tiled` needs

  const LinearArithmetic& in(Compute compute) const { return arithmetic[int(compute)]; }

  // input (tokens, K) of `dtype` -> units (groups, tokens, group) in the order in which `direct` decodes a group.
  void (*prepare_direct)(const void* input, DType dtype, int64_t tokens, const RowLayout& layout, Compute compute, void* units);

  // output[:, row_begin:row_end] for up to kPassTokens prepared tokens, straight from the packed rows.
  void (*direct)(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& layout, Compute compute,
                 const void* units, int64_t tokens, const LowRank* low_rank, const LinearOutput& output);

  // input (tokens, K) -> units, transposed: tile after tile of (padded K, tokens of the tile); tiles [tile_begin, tile_end).
  void (*prepare_tiled)(const void* input, DType dtype, int64_t tokens, const RowLayout& layout, Compute compute,
                        int64_t tile_begin, int64_t tile_end, void* units);

  // output[:, row_begin:row_end] for up to kLinearTokens prepared tokens.
  void (*tiled)(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& layout, Compute compute,
                const void* units, int64_t tokens, const LowRank* low_rank, const LinearOutput& output, void* scratch);

  // matrix (tokens, columns) of `dtype` -> units of tokens [begin, end) for `turned` and `backward`, `begin` a multiple of matrix_tokens,
  // in a buffer of (tokens rounded up to matrix_tokens) x (columns in units, rounded up to matrix_units). Up to column_tokens tokens.
  void (*prepare_matrix)(const void* matrix, DType dtype, int64_t tokens, int64_t columns, Compute compute, int64_t begin, int64_t end,
                         void* units);

  // output[:, row_begin:row_end] for up to column_tokens tokens. For many tokens.
  // scratch: turned_scratch's bytes, for that many rows.
  void (*turned)(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& layout, Compute compute,
                 const TokenUnits& input, int64_t tokens, const LowRank* low_rank, const LinearOutput& output, void* scratch);
  int64_t (*turned_scratch)(Compute compute, int64_t tokens, int64_t rows, int64_t in_features);

  // output[:, group_begin * group : group_end * group] = grad (tokens, N) @ weight, for up to column_tokens tokens.
  // scratch: backward_scratch's bytes, for that many groups of columns and more.
  void (*backward)(const uint8_t* packed, int64_t rows, int64_t group_begin, int64_t group_end, const RowLayout& layout,
                   Compute compute, const TokenUnits& grad, int64_t tokens, const LowRank* low_rank, const LinearOutput& output,
                   void* scratch);
  int64_t (*backward_scratch)(Compute compute, int64_t tokens, int64_t rows, int64_t groups, int64_t rank);

  // A slice's part of the backward of up to kPassTokens tokens, straight from its rows: sums (tokens, sums_stride), columns of each group
  // in an order of their own, = grad (tokens, rows) @ rows. `packed` and `grad`, of `dtype`, tokens grad_stride elements apart, begin with
  // the slice; sums_stride is K rounded up to groups.
  void (*backward_direct)(const uint8_t* packed, int64_t rows, int64_t group_begin, int64_t group_end, const RowLayout& layout,
                          Compute compute, const void* grad, DType dtype, int64_t grad_stride, int64_t tokens, float* sums,
                          int64_t sums_stride);

  // output[:, group_begin * group : group_end * group] = what backward_direct left of all slices, (slices, tokens, sums_stride), added up,
  // and a low-rank part in units of fp32.
  void (*finish_backward)(const float* sums, int64_t slices, int64_t tokens, int64_t sums_stride, int64_t group_begin, int64_t group_end,
                          const RowLayout& layout, Compute compute, const LowRank* low_rank, const LinearOutput& output);

  // matrix (rows, columns) of `dtype`, times `factor` in fp32 -> elements [offset, offset + columns) of (rows, stride) units.
  void (*prepare_low_rank)(const void* matrix, DType dtype, int64_t rows, int64_t columns, float factor, Compute compute,
                           int64_t offset, int64_t stride, void* units);

  // matrix (tokens, R) of `dtype`, times `factor` -> units, transposed: tile after tile of (R in units, tokens of the tile).
  void (*prepare_low_rank_tiled)(const void* matrix, DType dtype, int64_t tokens, int64_t rank, float factor, Compute compute,
                                 void* units);
};

// Rows of the largest micro-kernel: up to so many less one past the last are multiplied, and not stored.
inline constexpr int64_t kMostTileRows = 32;

// Tokens of one call of `direct`. With more, registers hold the sums of fewer rows: two calls of 4 are faster than one of 8.
inline constexpr int64_t kPassTokens = 4;

// Tokens that `tiled` handles at once: 512 x 192 partial sums fit L2, and decoding a weight costs a few percent of 512 multiplications.
inline constexpr int64_t kLinearTokens = 512;

}  // namespace halfbyte::cpu
