// Front of fp8_linear on CUDA: one launch prepares the operands, aten::_scaled_mm multiplies the weight's codes where they lie;
// where fp8_linear_route.h knows an obstacle, both sides are decoded and multiplied in the input's dtype.
#include "fp8_linear_route.h"
#include "linear_driver.h"

namespace halfbyte::cuda {
namespace {

// The codes of packed fp8 rows, transposed: (K, N), column-major with columns row_bytes apart. Nothing is copied.
Tensor transposed_codes(const Tensor& packed, const RowLayout& layout) {
  return torch::stable::from_blob(const_cast<void*>(packed.const_data_ptr()), {layout.in_features, packed.size(0)},
                                  {1, layout.row_bytes}, packed.device(), ScalarType::Float8_e4m3fn);
}

// x as its fp8 codes stand for it, in x's dtype.
Tensor rounded_tokens(const Tensor& x, const RowLayout& layout, DType dtype, const LaunchScope& scope) {
  const int64_t M = leading_numel(x);
  Tensor rows = torch::stable::new_empty(x, {M, layout.row_bytes}, ScalarType::Byte);
  Tensor rounded = torch::stable::empty_like(x);
  scope.check(launch_quantize(x.const_data_ptr(), dtype, nullptr, M, layout, rows.mutable_data_ptr<uint8_t>(), scope.stream()));
  scope.check(launch_dequantize(rows.const_data_ptr<uint8_t>(), M, layout, dtype, rounded.mutable_data_ptr(), scope.stream()));
  return rounded;
}

Tensor fp8_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t in_features) {
  constexpr const char* op = "fp8_linear";
  const RowLayout layout = checked_linear(op, input, packed, bias, kFP8, 0, in_features);
  const DType dtype = checked_dtype(op, "input", input.scalar_type());
  const NoGradGuard no_grad;
  const LaunchScope scope(op, packed);
  const Tensor x = torch::stable::contiguous(input), weight = torch::stable::contiguous(packed);
  const int64_t M = leading_numel(x), N = weight.size(0), K = in_features;
  if (M == 0 || N == 0) return torch::stable::new_empty(x, with_last_size(x, N), x.scalar_type());
  const int width = access_width(weight.const_data_ptr(), layout.row_bytes);
  if (fp8_obstacle({M, N, K, dtype, width, fp8_capability()}) >= 0)
    return aten_linear(rounded_tokens(x, layout, dtype, scope), dense_weight(op, weight, layout, x.scalar_type()), bias);
  Tensor codes = torch::stable::new_empty(x, {M, K}, ScalarType::Float8_e4m3fn);
  Tensor token_scales = torch::stable::new_empty(x, {M, 1}, ScalarType::Float);
  Tensor row_scales = torch::stable::new_empty(x, {1, N}, ScalarType::Float);
  scope.check(launch_fp8_operands(x.const_data_ptr(), dtype, M, weight.const_data_ptr<uint8_t>(), N, layout,
                                  static_cast<uint8_t*>(codes.mutable_data_ptr()), token_scales.mutable_data_ptr<float>(),
                                  row_scales.mutable_data_ptr<float>(), scope.stream()));
  std::optional<Tensor> added;
  if (bias) added = torch::stable::contiguous(*bias);
  const Tensor output = aten_scaled_mm(codes, transposed_codes(weight, layout), token_scales, row_scales, added, x.scalar_type());
  return torch::stable::reshape(output, with_last_size(x, N));
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) { halfbyte::impl_both(m, "fp8_linear", TORCH_BOX(&halfbyte::cuda::fp8_linear)); }
