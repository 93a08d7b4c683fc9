// Launchers: raw pointers and sizes, no torch. All arguments have been checked by the fronts; every launcher is
// asynchronous on `stream`, allocates nothing, and returns the error of its launches.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "../error_feedback.h"
#include "../formats.h"
#include "../optimizer.h"

namespace halfbyte::cuda {

struct OptimizerTable;
struct OptimizerInputs;

// One tensor of dequantize: packed (rows, row_bytes) -> output (rows, K), both contiguous, any alignment.
struct DequantizeTensor {
  const uint8_t* packed;
  int64_t rows;
  RowLayout layout;
  void* output;
};

// `count` tensors of one format and block size -> outputs of dtype: one launch for up to 48 of them, another where some lie on
// odd addresses or have odd row lengths.
cudaError_t launch_dequantize(const DequantizeTensor* tensors, size_t count, DType dtype, cudaStream_t stream);
inline cudaError_t launch_dequantize(const uint8_t* packed, int64_t rows, const RowLayout& layout, DType dtype, void* output,
                                     cudaStream_t stream) {
  const DequantizeTensor tensor{packed, rows, layout, output};
  return launch_dequantize(&tensor, 1, dtype, stream);
}

// Row indices[i] of packed (num_embeddings, row_bytes) -> output row i. indices (count,) int64 (`wide`) or int32. An index
// out of range stops the kernel with a device-side assertion, as torch's embedding does.
cudaError_t launch_embedding(const void* indices, bool wide, int64_t count, const uint8_t* packed, int64_t num_embeddings,
                             const RowLayout& layout, DType dtype, void* output, cudaStream_t stream);

// One tensor of quantize: input (rows, K), contiguous, any alignment -> packed (rows, row_bytes), 16-byte aligned. scales (rows,
// num_blocks) float32 replaces the computed absmax unless null, as it is in every entry of a list.
struct QuantizeTensor {
  const void* input;
  const float* scales;
  int64_t rows;
  RowLayout layout;
  uint8_t* packed;
};

// `count` tensors of dtype -> rows of one format and block size: one launch for up to 28 of them, another where some lie on odd
// addresses or have odd row lengths.
cudaError_t launch_quantize(const QuantizeTensor* tensors, size_t count, DType dtype, cudaStream_t stream);
inline cudaError_t launch_quantize(const void* input, DType dtype, const float* scales, int64_t rows, const RowLayout& layout,
                                   uint8_t* packed, cudaStream_t stream) {
  const QuantizeTensor tensor{input, scales, rows, layout, packed};
  return launch_quantize(&tensor, 1, dtype, stream);
}

// A product with packed that a kernel makes without writing the weight anywhere; linear_route.h says which problems. linear:
// input (M, K), `columns` is N. linear_backward_input: input is grad_output (M, N), `columns` is K.
struct PackedProduct {
  const void* input;      // of dtype, contiguous
  const uint8_t* packed;  // (N, row_bytes), contiguous
  int64_t M, N;
  RowLayout layout;
  DType dtype;
  const void* addend;     // (columns,) of dtype (addend_stride 0), (M, addend_stride) of dtype, or null
  int64_t addend_stride;
  void* output;           // (M, columns) of dtype
  float* partial;         // (splits, M, columns), or null where splits is 1
  int64_t splits;         // of the reduction: what the kernel's *_splits gives on the current device
};
int64_t linear_small_splits(int64_t N, int64_t K);
cudaError_t launch_linear_small(const PackedProduct& product, cudaStream_t stream);
cudaError_t launch_linear_single(const PackedProduct& product, cudaStream_t stream);  // of one row; launch_linear_small calls it
int64_t linear_tiled_splits(int64_t N, int64_t K);
cudaError_t launch_linear_tiled(const PackedProduct& product, cudaStream_t stream);
bool linear_wgmma_available();  // the current device has wgmma, and this build has the kernel
int64_t linear_wgmma_splits(int64_t N, int64_t K);
cudaError_t launch_linear_wgmma(const PackedProduct& product, cudaStream_t stream);
int64_t linear_backward_small_splits(int64_t N, int64_t K);
int64_t linear_backward_tiled_splits(int64_t N, int64_t K);
cudaError_t launch_linear_backward(const PackedProduct& product, cudaStream_t stream);
int64_t linear_backward_wgmma_splits(int64_t N, int64_t K);
cudaError_t launch_linear_backward_wgmma(const PackedProduct& product, cudaStream_t stream);

// `bytes` bytes of a mask (dropout.h); the seed is device memory.
cudaError_t launch_dropout_mask(const int64_t* seed, uint32_t dropped, int64_t bytes, uint8_t* mask, cudaStream_t stream);

// What the mask keeps of input (rows, columns) of dtype, zeros for the rest -> output, which may be input.
cudaError_t launch_keep(const void* input, DType dtype, int64_t rows, int64_t columns, const uint8_t* mask, void* output,
                        cudaStream_t stream);

// Rows of args (error_feedback.h), device pointers.
cudaError_t launch_error_feedback(const FeedbackArgs& args, int64_t rows, const RowLayout& layout, cudaStream_t stream);

// int8_linear for tokens (M, row_bytes) and packed (N, row_bytes), both int8 rows, 16-byte aligned. sums: (M, N) int32 that
// another kernel has made, or null: computed here. bias: (N,) of dtype or null.
cudaError_t launch_int8_linear(const uint8_t* tokens, int64_t M, const uint8_t* packed, int64_t N, const RowLayout& layout,
                               const int32_t* sums, DType dtype, const void* bias, void* output, cudaStream_t stream);

// Operands of aten::_scaled_mm for fp8_linear (problems that fp8_linear_route.h lets through): codes (M, K) e4m3 and
// token_scales (M,) of input (M, K) of dtype; row_scales (N,) of packed (N, row_bytes), fp8 rows, 16-byte aligned.
int fp8_capability();  // compute capability of the current device, 10 * major + minor
cudaError_t launch_fp8_operands(const void* input, DType dtype, int64_t M, const uint8_t* packed, int64_t N, const RowLayout& layout,
                                uint8_t* codes, float* token_scales, float* row_scales, cudaStream_t stream);

// One step of every parameter of the table (optimizer_table.h). Device memory is read for the inputs and the step counts.
cudaError_t launch_optimizer(OptimizerRule rule, const OptimizerTable& table, const OptimizerHyper& hyper,
                             const OptimizerInputs& inputs, cudaStream_t stream);

}  // namespace halfbyte::cuda
