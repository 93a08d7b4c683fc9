// Front of embedding on the CPU: gather packed rows and decode them straight into the output.
#include "../operands.h"
#include "isa.h"
#include "output_memory.h"

namespace halfbyte::cpu {
namespace {

Tensor embedding(const Tensor& indices, const Tensor& packed, int64_t format, int64_t block_size, int64_t embedding_dim,
                 ScalarType dtype) {
  constexpr const char* op = "embedding";
  const RowLayout layout = checked_layout(op, format, block_size, embedding_dim);
  const bool wide = checked_embedding(op, indices, packed, layout);
  const DType out_dtype = checked_dtype(op, "dtype", dtype);
  const Tensor ids = as_contiguous(indices);
  const Tensor rows = as_contiguous(packed);
  std::vector<int64_t> sizes(indices.sizes().begin(), indices.sizes().end());
  sizes.push_back(embedding_dim);
  Tensor output = new_buffer(rows, sizes, dtype);
  const int64_t count = ids.numel(), num_embeddings = packed.size(0);
  const void* id_data = ids.const_data_ptr();
  const auto id_at = [&](int64_t i) {
    return wide ? static_cast<const int64_t*>(id_data)[i] : int64_t(static_cast<const int32_t*>(id_data)[i]);
  };
  for (int64_t i = 0; i < count; ++i) {
    if (id_at(i) < 0 || id_at(i) >= num_embeddings) [[unlikely]]
      throw std::out_of_range("halfbyte::embedding: indices must be from 0 to " + std::to_string(num_embeddings - 1) +
                              ", got " + std::to_string(id_at(i)));
  }
  const auto* source = rows.const_data_ptr<uint8_t>();
  auto* target = static_cast<char*>(output.mutable_data_ptr());
  const int64_t output_row = embedding_dim * int64_t(output.element_size());
  const bool stream = bypasses_caches(target, count * output_row, count * output_row);
  const Kernels& table = kernels();
  parallel_rows(count, 1 + (int64_t(1) << 15) / embedding_dim, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // The rows lie anywhere: no hardware prefetcher finds the next one.
      const int64_t next = i + 2 < end ? i + 2 : i;
      for (int64_t byte = 0; byte < layout.row_bytes && byte < 4096; byte += 64)
        __builtin_prefetch(source + id_at(next) * layout.row_bytes + byte);
      table.dequantize_rows(source + id_at(i) * layout.row_bytes, 1, layout, out_dtype, target + i * output_row, stream);
    }
  });
  return output;
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) { m.impl("embedding", TORCH_BOX(&halfbyte::cpu::embedding)); }
