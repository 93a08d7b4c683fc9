// Fronts of quantize, quantize_with_scales and quantize_ on the CPU: check, allocate, split rows over threads.
#include "../bridge.h"
#include "../operands.h"
#include "isa.h"
#include "output_memory.h"

namespace halfbyte::cpu {
namespace {

Tensor quantize_checked(const char* op, const Tensor& input, const std::optional<Tensor>& scales, int64_t format,
                        int64_t block_size, const std::optional<Tensor>& into = std::nullopt) {
  HALFBYTE_CHECK(input.dim() >= 2, op, "input must have at least 2 dimensions, got shape ", shape_text(input));
  const DType dtype = checked_dtype(op, "input", input.scalar_type());
  const RowLayout layout = checked_layout(op, format, block_size, input.size(input.dim() - 1));
  const int64_t rows = leading_numel(input);
  const Tensor x = as_contiguous(input);
  std::optional<Tensor> s;
  if (scales) {
    check_scales(op, input, *scales, layout);
    s = as_contiguous(*scales);
  }
  if (into) check_target(op, *into, input, layout);
  Tensor packed = into ? *into : new_tensor(x, with_last_size(input, layout.row_bytes), ScalarType::Byte);
  const int64_t source_row = layout.in_features * int64_t(x.element_size());
  if (!into) prefer_huge_pages(packed.mutable_data_ptr(), rows * layout.row_bytes);
  const auto* source = static_cast<const char*>(x.const_data_ptr());
  const float* given = s ? s->const_data_ptr<float>() : nullptr;
  auto* target = packed.mutable_data_ptr<uint8_t>();
  const Kernels& table = kernels();
  parallel_rows(rows, 1 + (int64_t(1) << 14) / layout.in_features, [&](int64_t begin, int64_t end) {
    table.quantize_rows(source + begin * source_row, dtype, given ? given + begin * layout.num_blocks : nullptr,
                        end - begin, layout, target + begin * layout.row_bytes);
  });
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
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) {
  m.impl("quantize", TORCH_BOX(&halfbyte::cpu::quantize));
  m.impl("quantize_with_scales", TORCH_BOX(&halfbyte::cpu::quantize_with_scales));
  m.impl("quantize_", TORCH_BOX(&halfbyte::cpu::quantize_));
}
