// Fronts of dequantize and dequantize_list on the CPU: check, allocate, split rows over threads.
#include "dequantize.h"

#include "../operands.h"
#include "isa.h"
#include "output_memory.h"

namespace halfbyte::cpu {

constexpr int64_t kGrain = int64_t(1) << 15;  // elements a thread should get at least

void dequantize_into(const uint8_t* packed, int64_t rows, const RowLayout& layout, DType dtype, void* output, bool stream) {
  const int64_t output_row = layout.in_features * (dtype == DType::kFloat32 ? 4 : 2);
  const Kernels& table = kernels();
  parallel_rows(rows, 1 + kGrain / layout.in_features, [&](int64_t begin, int64_t end) {
    table.dequantize_rows(packed + begin * layout.row_bytes, end - begin, layout, dtype,
                          static_cast<char*>(output) + begin * output_row, stream);
  });
}

namespace {

Tensor dequantize(const Tensor& packed, int64_t format, int64_t block_size, int64_t in_features, ScalarType dtype) {
  constexpr const char* op = "dequantize";
  const RowLayout layout = checked_layout(op, format, block_size, in_features);
  check_packed(op, packed, layout);
  const DType out_dtype = checked_dtype(op, "dtype", dtype);
  const Tensor source = as_contiguous(packed);
  Tensor output = new_buffer(source, with_last_size(packed, in_features), dtype);
  const int64_t output_bytes = output.numel() * int64_t(output.element_size());
  void* const to = output.mutable_data_ptr();
  dequantize_into(source.const_data_ptr<uint8_t>(), leading_numel(packed), layout, out_dtype, to,
                  bypasses_caches(to, output_bytes, output_bytes));
  return output;
}

std::vector<Tensor> dequantize_list(const std::vector<Tensor>& packed, int64_t format, int64_t block_size,
                                    const std::vector<int64_t>& in_features, ScalarType dtype) {
  constexpr const char* op = "dequantize_list";
  const std::vector<RowLayout> layouts = checked_packed_list(op, packed, format, block_size, in_features);
  const DType out_dtype = checked_dtype(op, "dtype", dtype);
  const int64_t element_size = out_dtype == DType::kFloat32 ? 4 : 2;
  std::vector<Tensor> sources, outputs;
  std::vector<const uint8_t*> from;
  std::vector<char*> to;
  std::vector<int64_t> rows;
  std::vector<int64_t> bytes;
  int64_t together = 0;
  for (size_t i = 0; i < packed.size(); ++i) {
    sources.push_back(as_contiguous(packed[i]));
    outputs.push_back(new_buffer(packed[i], with_last_size(packed[i], in_features[i]), dtype));
    from.push_back(static_cast<const uint8_t*>(sources[i].const_data_ptr()));
    to.push_back(static_cast<char*>(outputs[i].mutable_data_ptr()));
    rows.push_back(leading_numel(packed[i]));
    bytes.push_back(rows[i] * in_features[i] * element_size);
    together += bytes[i];
  }
  std::vector<char> stream;
  for (size_t i = 0; i < packed.size(); ++i) stream.push_back(bypasses_caches(to[i], bytes[i], together));
  const Kernels& table = kernels();
  parallel_lists(rows, in_features, kGrain, [&](size_t i, int64_t begin, int64_t end) {
    table.dequantize_rows(from[i] + begin * layouts[i].row_bytes, end - begin, layouts[i], out_dtype,
                          to[i] + begin * in_features[i] * element_size, stream[i]);
  });
  return outputs;
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) {
  m.impl("dequantize", TORCH_BOX(&halfbyte::cpu::dequantize));
  m.impl("dequantize_list", TORCH_BOX(&halfbyte::cpu::dequantize_list));
}
