// Front of int8_linear on the CPU: quantize the activations by the int8 rule, then integer kernels on both sides' codes.
#include "int8_linear_kernels.h"
#include "linear_driver.h"

namespace halfbyte::cpu {
namespace {

void quantize_tokens(const char* x, DType dtype, int64_t tokens, const RowLayout& layout, uint8_t* rows) {
  const int64_t row = layout.in_features * (dtype == DType::kFloat32 ? 4 : 2);
  parallel_rows(tokens, row_grain(4 * layout.in_features), [&](int64_t begin, int64_t end) {
    kernels().quantize_rows(x + begin * row, dtype, nullptr, end - begin, layout, rows + begin * layout.row_bytes);
  });
}

void run_direct(const uint8_t* rows, int64_t tokens, const uint8_t* packed, int64_t N, const RowLayout& layout, const Tensor& like,
                const LinearOutput& target) {
  const Int8LinearKernels& table = kernels().int8_linear;
  const int64_t padded = round_up(layout.in_features, table.direct_step);
  Tensor codes = new_tensor(like, {tokens * padded * table.direct_bytes}, ScalarType::Byte);
  int32_t sums[4];
  float factors[4];
  table.prepare_direct(rows, tokens, layout, codes.mutable_data_ptr(), sums, factors);
  const void* prepared = codes.const_data_ptr();
  parallel_rows(N, row_grain(layout.in_features), [&](int64_t begin, int64_t end) {
    table.direct(packed, begin, end, layout, prepared, sums, factors, tokens, target);
  });
}

Tensor int8_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t in_features) {
  constexpr const char* op = "int8_linear";
  const RowLayout layout = checked_int8_linear(op, input, packed, bias, in_features);
  const int64_t N = packed.size(0), tokens = leading_numel(input), K = in_features;
  const NoGradGuard no_grad;
  std::optional<Tensor> added;
  if (bias) added = as_contiguous(*bias);
  const Tensor x = as_contiguous(input), weight = as_contiguous(packed);
  Tensor output = new_buffer(x, with_last_size(input, N), x.scalar_type());
  if (N == 0 || tokens == 0) return output;
  const DType dtype = checked_dtype(op, "input", x.scalar_type());
  const LinearKernels& shared = kernels().linear;
  const Int8LinearKernels& table = kernels().int8_linear;
  const auto* codes = weight.const_data_ptr<uint8_t>();
  const int64_t most = std::min(tokens, kLinearTokens);
  Tensor buffer = new_tensor(x, {most * layout.row_bytes}, ScalarType::Byte);
  auto* rows = buffer.mutable_data_ptr<uint8_t>();
  LinearOutput target{output.mutable_data_ptr(), added ? added->const_data_ptr() : nullptr, N, dtype};
  if (tokens <= table.direct_tokens) {
    quantize_tokens(at_row(x, 0, K), dtype, tokens, layout, rows);
    run_direct(rows, tokens, codes, N, layout, x, target);
    return output;
  }
  const int64_t units_of_row = round_up((K + table.unit_elements - 1) / table.unit_elements, table.unit_multiple);
  Tensor units = new_tensor(x, {round_up(most, shared.tile_tokens) * units_of_row * 4}, ScalarType::Byte);
  Tensor factors = new_tensor(x, {most}, ScalarType::Float);
  void* prepared = units.mutable_data_ptr();
  float* token_factors = factors.mutable_data_ptr<float>();
  for (int64_t m = 0; m < tokens; m += kLinearTokens) {
    const int64_t count = std::min(tokens - m, kLinearTokens);
    quantize_tokens(at_row(x, m, K), dtype, count, layout, rows);
    parallel_rows((count + shared.tile_tokens - 1) / shared.tile_tokens, row_grain(K * shared.tile_tokens),
                  [&](int64_t begin, int64_t end) {
                    table.prepare_tiled(rows, count, layout, begin, end, prepared, token_factors);
                  });
    parallel_blocks(N, table.block_rows, row_grain(K * count), [&](int64_t begin, int64_t end) {
      const WorkspaceLease scratch(shared.scratch_bytes);
      table.tiled(codes, begin, end, layout, prepared, token_factors, count, target, scratch.data());
    });
    target.data = static_cast<char*>(target.data) + N * (dtype == DType::kFloat32 ? 4 : 2) * count;
  }
  return output;
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) { m.impl("int8_linear", TORCH_BOX(&halfbyte::cpu::int8_linear)); }
