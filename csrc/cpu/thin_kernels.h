// The entries of thin products in the table of CPU kernels (kernels.h): raw pointers only, no torch.
//
// A product is thin where one operand has few rows, as LoRA's A and B and what they project have. That one is copied to fp32, and rows of
// any element type meet it as they lie, dropped elements as zeros. Sums are fp32; their order depends on the sizes alone.
#pragma once

#include <stdint.h>

#include "linear_kernels.h"

namespace halfbyte::cpu {

// Rows as they lie.
struct ThinMatrix {
  const void* data;
  DType dtype;
  int64_t stride;       // elements from one row to the next
  const uint8_t* mask;  // of dropout (dropout.h), its byte of the first element; null: everything is kept
  int64_t mask_stride;  // bytes
};

constexpr int64_t kFewRanks = 32;

struct ThinKernels {
  int32_t ranks;    // a thin operand's rank is padded with zeros to a multiple of it
  int32_t lanes;    // floats of a vector
  int32_t columns;  // that one call of `gradient` should take a multiple of, whole bytes of a mask
  // Multiply-adds up to which a product takes no longer than aten's of bf16 by bf16 where that one uses bf16 units, of up to kFewRanks
  // ranks and of more.
  int64_t few_ranks_most, many_ranks_most;

  // matrix (rows, columns) of `dtype`, `row_stride` elements apart, times `factor` -> floats (rows, stride), zeros past columns.
  void (*prepare)(const void* matrix, DType dtype, int64_t row_stride, int64_t rows, int64_t columns, float factor, int64_t stride,
                  float* out);

  // The same, transposed: -> floats [row_begin, row_end) of (columns, stride), zeros past rows; row_end <= stride.
  void (*prepare_turned)(const void* matrix, DType dtype, int64_t row_stride, int64_t rows, int64_t columns, float factor,
                         int64_t row_begin, int64_t row_end, int64_t stride, float* out);

  // out (tokens, ranks) of floats, `out_stride` apart, = matrix (tokens, columns) @ thin (padded ranks, columns)^T. `thin`: rows
  // `thin_stride` apart, zeros up to the next whole vector.
  void (*project)(const ThinMatrix& matrix, int64_t tokens, int64_t columns, const float* thin, int64_t thin_stride, int64_t ranks,
                  float* out, int64_t out_stride);

  // out[r * rank_stride + c * column_stride] of `out_dtype` = (thin (tokens, padded ranks)^T @ matrix (tokens, columns))[r, c]. One of
  // the strides is 1.
  void (*gradient)(const ThinMatrix& matrix, int64_t tokens, int64_t columns, const float* thin, int64_t thin_stride, int64_t ranks,
                   void* out, DType out_dtype, int64_t rank_stride, int64_t column_stride);

  // out (tokens, columns) += what `mask` keeps of left (tokens, ranks) @ thin (ranks, columns); left's rows are floats `left_stride`
  // apart, `thin` and the mask as above.
  void (*add_kept)(const float* left, int64_t left_stride, const float* thin, int64_t thin_stride, int64_t ranks, const uint8_t* mask,
                   int64_t mask_stride, int64_t tokens, int64_t columns, const LinearOutput& out);

  // floats (rows, columns), `stride` apart -> out (rows, columns) of `dtype`, contiguous.
  void (*store)(const float* floats, int64_t stride, int64_t rows, int64_t columns, DType dtype, void* out);
};

}  // namespace halfbyte::cpu
