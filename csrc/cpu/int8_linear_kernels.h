// The entries of `int8_linear` in the table of CPU kernels (kernels.h): raw pointers only, no torch.
//
// Legend: see linear_kernels.h. Rows are packed int8 rows of the formats: activations are quantized by the same rule as
// weights, so both sides are codes and one absmax. Sums are int32 and exact (checked_int8_linear bounds K).
#pragma once

#include <stdint.h>

#include "linear_kernels.h"

namespace halfbyte::cpu {

constexpr int64_t kMostDirectTokens = 16;  // of Int8LinearKernels' direct_tokens and rest_tokens

// Which one a call of `direct` is of those that take the same rows for other tokens.
struct Pass {
  int64_t index, count;
};

struct Int8LinearKernels {
  int32_t unit_elements;     // codes of a 4-byte unit in tiles of activations
  int32_t block_rows;        // rows of one micro-kernel
  int32_t unit_multiple;     // units of a prepared token are padded to a multiple
  int32_t direct_step;       // codes that `direct` takes at once; prepared tokens are padded with zeros to a multiple
  int32_t direct_bytes;      // bytes of a prepared code
  int32_t direct_tokens;     // up to this M `direct` is the faster one, kPassTokens at a time,
  int32_t rest_tokens;       // and beside `tiled` for as many that fill no vector; 0: `tiled` takes all
  int32_t panel_rows;        // rows that `tiled` has together
  int32_t decoding_tokens;   // `tiled` decodes a weight in the time of multiplying it by so many tokens;
  int32_t sharing_rows;      // waiting for a token that another thread prepares and reading it: multiplying it by so many rows

  // rows (tokens, row_bytes) -> codes (tokens, padded K), their sums and the factors absmax / 127, one per token.
  void (*prepare_direct)(const uint8_t* rows, int64_t tokens, const RowLayout& layout, void* codes, int32_t* sums, float* factors);

  // output[:, row_begin:row_end] for 1 to kPassTokens tokens, straight from the packed rows. The passes over the same rows fetch as
  // many behind them.
  void (*direct)(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& layout, const void* codes,
                 const int32_t* sums, const float* factors, int64_t tokens, const Pass& pass, const LinearOutput& output);

  // rows of a vector of tokens, of `tokens` in all, from token `first`, a multiple of linear's `lanes`, on -> their units, transposed like
  // linear's prepare_tiled, and their factors. Reads up to 64 bytes past the rows.
  void (*prepare_tiled)(const uint8_t* rows, int64_t first, int64_t tokens, const RowLayout& layout, void* units, float* factors);

  // output[:, row_begin:row_end] for up to kLinearTokens prepared tokens; scratch as for linear's `tiled`.
  void (*tiled)(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& layout, const void* units,
                const float* factors, int64_t tokens, const LinearOutput& output, void* scratch);
};

}  // namespace halfbyte::cpu
