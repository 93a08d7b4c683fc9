// Front of dequantize on the CPU: check, allocate, split rows over threads.
#include "dequantize.h"

#include "isa.h"
#include "output_memory.h"

namespace halfbyte::cpu {

void dequantize_into(const uint8_t* packed, int64_t rows, const RowLayout& layout, DType dtype, void* output, bool stream) {
  const int64_t output_row = layout.in_features * (dtype == DType::kFloat32 ? 4 : 2);
  const Kernels& table = kernels();
  parallel_rows(rows, 1 + (int64_t(1) << 15) / layout.in_features, [&](int64_t begin, int64_t end) {
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
  Tensor output = new_tensor(source, with_last_size(packed, in_features), dtype);
  const int64_t output_bytes = output.numel() * int64_t(output.element_size());
  prefer_huge_pages(output.mutable_data_ptr(), output_bytes);
  dequantize_into(source.const_data_ptr<uint8_t>(), leading_numel(packed), layout, out_dtype, output.mutable_data_ptr(),
                  output_bytes >= kStreamBytes);
  return output;
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) { m.impl("dequantize", TORCH_BOX(&halfbyte::cpu::dequantize)); }
