// Fronts of quantize, quantize_with_scales and quantize_ on CUDA: check, allocate, one launch.
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

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) {
  m.impl("quantize", TORCH_BOX(&halfbyte::cuda::quantize));
  m.impl("quantize_with_scales", TORCH_BOX(&halfbyte::cuda::quantize_with_scales));
  m.impl("quantize_", TORCH_BOX(&halfbyte::cuda::quantize_));
}
