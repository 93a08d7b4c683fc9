// Every schema of halfbyte. In C++, so that exported and AOT-compiled models need this library alone.
//
// Legend: packed (..., N, row_bytes) uint8 rows of `format` (ids of formats.h) with `block_size` elements per scale (0 = the
// whole row); in_features = K. Mutating ops end in `_`. Kernels are registered at the foot of cpu/<op>.cpp and cuda/<op>.cpp.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(halfbyte, m) {
  // (..., K) float -> (..., row_bytes) uint8
  m.def("quantize(Tensor input, int format, int block_size) -> Tensor");
  // the same with given absmax values: scales (..., num_blocks) float32
  m.def("quantize_with_scales(Tensor input, Tensor scales, int format, int block_size) -> Tensor");
  // (..., row_bytes) uint8 -> (..., K) dtype
  m.def("dequantize(Tensor packed, int format, int block_size, int in_features, ScalarType dtype) -> Tensor");
  // (..., K) x packed (N, row_bytes) + bias (N,) -> (..., N), in input's dtype
  m.def("linear(Tensor input, Tensor packed, Tensor? bias, int format, int block_size, int in_features) -> Tensor");
  // gradient of linear's input: (..., N) x packed (N, row_bytes) -> (..., K), in grad_output's dtype
  m.def("linear_backward_input(Tensor grad_output, Tensor packed, int format, int block_size, int in_features) -> Tensor");
  // rows of packed (V, row_bytes) at indices (...) int64 or int32 -> (..., embedding_dim) dtype
  m.def("embedding(Tensor indices, Tensor packed, int format, int block_size, int embedding_dim, ScalarType dtype) -> Tensor");
  // instruction set of the CPU kernels in use: 0 scalar, 1 avx2, 2 avx512, 3 amx
  m.def("cpu_isa() -> int");
  // frees the scratch memory that CPU threads keep between calls; bytes kept now, over all threads
  m.def("clear_workspace() -> ()");
  m.def("workspace_bytes() -> int");
}
