// Front of embedding on CUDA: gather and decode in one launch. Indices are checked on the device, by an assertion as in
// torch: reading them here would stop the host until the GPU is idle, and would forbid graph capture.
#include "../operands.h"
#include "kernels.h"
#include "stream.h"

namespace halfbyte::cuda {
namespace {

Tensor embedding(const Tensor& indices, const Tensor& packed, int64_t format, int64_t block_size, int64_t embedding_dim,
                 ScalarType dtype) {
  constexpr const char* op = "embedding";
  const RowLayout layout = checked_layout(op, format, block_size, embedding_dim);
  const bool wide = checked_embedding(op, indices, packed, layout);
  const DType out_dtype = checked_dtype(op, "dtype", dtype);
  const LaunchScope scope(op, packed);
  const Tensor ids = torch::stable::contiguous(indices);
  const Tensor rows = torch::stable::contiguous(packed);
  std::vector<int64_t> sizes(indices.sizes().begin(), indices.sizes().end());
  sizes.push_back(embedding_dim);
  Tensor output = torch::stable::new_empty(rows, sizes, dtype);
  scope.check(launch_embedding(ids.const_data_ptr(), wide, ids.numel(), rows.const_data_ptr<uint8_t>(), packed.size(0), layout,
                               out_dtype, output.mutable_data_ptr(), scope.stream()));
  return output;
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) { m.impl("embedding", TORCH_BOX(&halfbyte::cuda::embedding)); }
