// Fronts of quantize, quantize_list, quantize_with_scales and quantize_ on the CPU: check, allocate, split rows over threads.
#include "../bridge.h"
#include "../operands.h"
#include "isa.h"
#include "output_memory.h"

namespace halfbyte::cpu {
namespace {

constexpr int64_t kGrain = int64_t(1) << 14;  // elements a thread should get at least

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
  Tensor packed = into ? *into : new_buffer(x, with_last_size(input, layout.row_bytes), ScalarType::Byte);
  const int64_t source_row = layout.in_features * int64_t(x.element_size());
  const auto* source = static_cast<const char*>(x.const_data_ptr());
  const float* given = s ? s->const_data_ptr<float>() : nullptr;
  auto* target = packed.mutable_data_ptr<uint8_t>();
  const Kernels& table = kernels();
  parallel_rows(rows, 1 + kGrain / layout.in_features, [&](int64_t begin, int64_t end) {
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

std::vector<Tensor> quantize_list(const std::vector<Tensor>& input, int64_t format, int64_t block_size) {
  constexpr const char* op = "quantize_list";
  const std::vector<RowLayout> layouts = checked_input_list(op, input, format, block_size);
  if (input.empty()) return {};
  const DType dtype = checked_dtype(op, "input", input[0].scalar_type());
  const int64_t element_size = int64_t(input[0].element_size());
  std::vector<Tensor> sources, outputs;
  std::vector<const char*> from;
  std::vector<uint8_t*> to;
  std::vector<int64_t> rows, columns;
  for (size_t i = 0; i < input.size(); ++i) {
    sources.push_back(as_contiguous(input[i]));
    outputs.push_back(new_buffer(input[i], with_last_size(input[i], layouts[i].row_bytes), ScalarType::Byte));
    from.push_back(static_cast<const char*>(sources[i].const_data_ptr()));
    to.push_back(static_cast<uint8_t*>(outputs[i].mutable_data_ptr()));
    rows.push_back(leading_numel(input[i]));
    columns.push_back(layouts[i].in_features);
  }
  const Kernels& table = kernels();
  parallel_lists(rows, columns, kGrain, [&](size_t i, int64_t begin, int64_t end) {
    table.quantize_rows(from[i] + begin * layouts[i].in_features * element_size, dtype, nullptr, end - begin, layouts[i],
                        to[i] + begin * layouts[i].row_bytes);
  });
  return outputs;
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) {
  m.impl("quantize", TORCH_BOX(&halfbyte::cpu::quantize));
  m.impl("quantize_list", TORCH_BOX(&halfbyte::cpu::quantize_list));
  m.impl("quantize_with_scales", TORCH_BOX(&halfbyte::cpu::quantize_with_scales));
  m.impl("quantize_", TORCH_BOX(&halfbyte::cpu::quantize_));
}
