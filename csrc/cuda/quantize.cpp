// Fronts of quantize, quantize_list, quantize_with_scales and quantize_ on CUDA: check, allocate, one launch.
#include "../operands.h"
#include "kernels.h"
#include "stream.h"

namespace halfbyte::cuda {
namespace {

Tensor quantize_checked(const char* op, const Tensor& input, const std::optional<Tensor>& scales, int64_t format,
                        int64_t block_size, const std::optional<Tensor>& into = std::nullopt) {
  HALFBYTE_CHECK(input.dim() >= 2, op, "input must have at least 2 dimensions, got shape ", shape_text(input));
  const DType dtype = checked_dtype(op, "input", input.scalar_type());
  const RowLayout layout = checked_layout(op, format, block_size, input.size(input.dim() - 1));
  if (scales) check_scales(op, input, *scales, layout);
  if (into) {
    check_target(op, *into, input, layout);
    HALFBYTE_CHECK(reinterpret_cast<uintptr_t>(into->const_data_ptr()) % 16 == 0, op, "packed must start at a multiple of 16 bytes");
  }
  const LaunchScope scope(op, input);
  const Tensor x = torch::stable::contiguous(input);
  const Tensor given = torch::stable::contiguous(scales ? *scales : x);  // x only stands for none
  Tensor packed = into ? *into : torch::stable::new_empty(x, with_last_size(input, layout.row_bytes), ScalarType::Byte);
  scope.check(launch_quantize(x.const_data_ptr(), dtype, scales ? given.const_data_ptr<float>() : nullptr, leading_numel(input),
                              layout, packed.mutable_data_ptr<uint8_t>(), scope.stream()));
  return packed;
}

Tensor quantize(const Tensor& input, int64_t format, int64_t block_size) {
  return quantize_checked("quantize", input, std::nullopt, format, block_size);
}

Tensor quantize_with_scales(const Tensor& input, const Tensor& scales, int64_t format, int64_t block_size) {
  return quantize_checked("quantize_with_scales", input, scales, format, block_size);
}

void quantize_(const Tensor& packed, const Tensor& input, int64_t format, int64_t block_size) {
  quantize_checked("quantize_", input, std::nullopt, format, block_size, packed);
}

std::vector<Tensor> quantize_list(const std::vector<Tensor>& input, int64_t format, int64_t block_size) {
  constexpr const char* op = "quantize_list";
  const std::vector<RowLayout> layouts = checked_input_list(op, input, format, block_size);
  if (input.empty()) return {};
  const LaunchScope scope(op, input[0]);
  std::vector<Tensor> sources, outputs;  // sources: copies of strided ones must live until the launch
  std::vector<QuantizeTensor> tensors;
  for (size_t i = 0; i < input.size(); ++i) {
    sources.push_back(as_contiguous(input[i]));
    outputs.push_back(new_tensor(input[i], with_last_size(input[i], layouts[i].row_bytes), ScalarType::Byte));
    tensors.push_back({sources[i].const_data_ptr(), nullptr, leading_numel(input[i]), layouts[i],
                       static_cast<uint8_t*>(outputs[i].mutable_data_ptr())});
  }
  const DType dtype = checked_dtype(op, "input", input[0].scalar_type());
  scope.check(launch_quantize(tensors.data(), tensors.size(), dtype, scope.stream()));
  return outputs;
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) {
  m.impl("quantize", TORCH_BOX(&halfbyte::cuda::quantize));
  m.impl("quantize_list", TORCH_BOX(&halfbyte::cuda::quantize_list));
  m.impl("quantize_with_scales", TORCH_BOX(&halfbyte::cuda::quantize_with_scales));
  m.impl("quantize_", TORCH_BOX(&halfbyte::cuda::quantize_));
}
