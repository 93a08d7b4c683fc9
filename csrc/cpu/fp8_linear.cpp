// Front of fp8_linear on the CPU: round the activations to fp8 by the rule for weights, then multiply both sides' values in
// float32 as linear does.
#include "linear_driver.h"

namespace halfbyte::cpu {
namespace {

Tensor fp8_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t in_features) {
  constexpr const char* op = "fp8_linear";
  const RowLayout layout = checked_linear(op, input, packed, bias, kFP8, 0, in_features);
  const int64_t N = packed.size(0), tokens = leading_numel(input), K = in_features;
  const NoGradGuard no_grad;
  std::optional<Tensor> added;
  if (bias) added = as_contiguous(*bias);
  const Tensor x = as_contiguous(input), weight = as_contiguous(packed);
  Tensor output = new_buffer(x, with_last_size(input, N), x.scalar_type());
  if (N == 0 || tokens == 0) return output;
  const DType dtype = checked_dtype(op, "input", x.scalar_type());
  const int64_t most = std::min(tokens, kLinearTokens);
  Tensor codes = torch::stable::new_empty(x, {most * layout.row_bytes}, ScalarType::Byte);
  Tensor values = torch::stable::new_empty(x, {most, K}, ScalarType::Float);
  auto* rows = codes.mutable_data_ptr<uint8_t>();
  auto* rounded = values.mutable_data_ptr<float>();
  LinearOutput target{output.mutable_data_ptr(), added ? added->const_data_ptr() : nullptr, N, dtype};
  for (int64_t m = 0; m < tokens; m += kLinearTokens) {
    const int64_t count = std::min(tokens - m, kLinearTokens);
    parallel_rows(count, row_grain(8 * K), [&](int64_t begin, int64_t end) {
      uint8_t* mine = rows + begin * layout.row_bytes;
      kernels().quantize_rows(at_row(x, m + begin, K), dtype, nullptr, end - begin, layout, mine);
      kernels().dequantize_rows(mine, end - begin, layout, DType::kFloat32, rounded + begin * K, false);
    });
    run_forward(values, count, weight.const_data_ptr<uint8_t>(), N, layout, DType::kFloat32, nullptr, target);
    target.data = static_cast<char*>(target.data) + count * N * int64_t(output.element_size());
  }
  return output;
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) { halfbyte::impl_both(m, "fp8_linear", TORCH_BOX(&halfbyte::cpu::fp8_linear)); }
