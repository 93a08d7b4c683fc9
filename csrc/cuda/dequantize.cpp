// Front of dequantize on CUDA: check, allocate, one launch (-dq scales are decoded in the same kernel).
#include "../operands.h"
#include "kernels.h"
#include "stream.h"

namespace halfbyte::cuda {
namespace {

Tensor dequantize(const Tensor& packed, int64_t format, int64_t block_size, int64_t in_features, ScalarType dtype) {
  constexpr const char* op = "dequantize";
  const RowLayout layout = checked_layout(op, format, block_size, in_features);
  check_packed(op, packed, layout);
  const DType out_dtype = checked_dtype(op, "dtype", dtype);
  const LaunchScope scope(op, packed);
  const Tensor source = torch::stable::contiguous(packed);
  Tensor output = torch::stable::new_empty(source, with_last_size(packed, in_features), dtype);
  scope.check(launch_dequantize(source.const_data_ptr<uint8_t>(), leading_numel(packed), layout, out_dtype,
                                output.mutable_data_ptr(), scope.stream()));
  return output;
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) { m.impl("dequantize", TORCH_BOX(&halfbyte::cuda::dequantize)); }
