// Fronts of dequantize and dequantize_list on CUDA: check, allocate, one launch (-dq scales are decoded in the same kernel).
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

std::vector<Tensor> dequantize_list(const std::vector<Tensor>& packed, int64_t format, int64_t block_size,
                                    const std::vector<int64_t>& in_features, ScalarType dtype) {
  constexpr const char* op = "dequantize_list";
  const std::vector<RowLayout> layouts = checked_packed_list(op, packed, format, block_size, in_features);
  const DType out_dtype = checked_dtype(op, "dtype", dtype);
  if (packed.empty()) return {};
  const LaunchScope scope(op, packed[0]);
  std::vector<Tensor> sources, outputs;  // sources: copies of strided ones must live until the launch
  std::vector<DequantizeTensor> tensors;
  for (size_t i = 0; i < packed.size(); ++i) {
    sources.push_back(as_contiguous(packed[i]));
    outputs.push_back(new_tensor(packed[i], with_last_size(packed[i], in_features[i]), dtype));
    tensors.push_back({static_cast<const uint8_t*>(sources[i].const_data_ptr()), leading_numel(packed[i]), layouts[i],
                       outputs[i].mutable_data_ptr()});
  }
  scope.check(launch_dequantize(tensors.data(), tensors.size(), out_dtype, scope.stream()));
  return outputs;
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) {
  m.impl("dequantize", TORCH_BOX(&halfbyte::cuda::dequantize));
  m.impl("dequantize_list", TORCH_BOX(&halfbyte::cuda::dequantize_list));
}
