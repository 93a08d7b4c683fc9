// Front of int8_linear on CUDA: quantize the tokens by one launch, multiply by aten::_int_mm where its shape rules allow (the
// epilogue is a launch of ours), else by a kernel that does both.
#include "../operands.h"
#include "geometry.h"
#include "int8_linear_route.h"
#include "kernels.h"
#include "stream.h"

namespace halfbyte::cuda {
namespace {

// The codes of packed int8 rows as a (rows, K) int8 matrix whose rows are row_bytes apart: nothing is copied.
Tensor codes_of(const Tensor& rows, const RowLayout& layout) {
  return torch::stable::from_blob(const_cast<void*>(rows.const_data_ptr()), {rows.size(0), layout.in_features}, {layout.row_bytes, 1},
                                  rows.device(), ScalarType::Char);
}

Tensor int8_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t in_features) {
  constexpr const char* op = "int8_linear";
  const RowLayout layout = checked_int8_linear(op, input, packed, bias, in_features);
  const int64_t M = leading_numel(input), N = packed.size(0);
  const NoGradGuard no_grad;
  const LaunchScope scope(op, packed);
  const Tensor x = torch::stable::contiguous(input);
  Tensor weight = torch::stable::contiguous(packed);
  if (access_width(weight.const_data_ptr(), layout.row_bytes) < 16) weight = torch::stable::clone(weight);
  const Tensor added = torch::stable::contiguous(bias ? *bias : x);  // x only stands for none
  Tensor output = torch::stable::new_empty(x, with_last_size(input, N), x.scalar_type());
  if (M == 0 || N == 0) return output;
  const DType dtype = checked_dtype(op, "input", x.scalar_type());
  const bool int_mm = takes_int_mm({M, N, in_features}), few = int_mm && M < kIntMMRows;
  Tensor tokens = torch::stable::new_empty(x, {few ? kIntMMRows : M, layout.row_bytes}, ScalarType::Byte);
  if (few) torch::stable::zero_(tokens);
  scope.check(launch_quantize(x.const_data_ptr(), dtype, nullptr, M, layout, tokens.mutable_data_ptr<uint8_t>(), scope.stream()));
  std::optional<Tensor> sums;
  if (int_mm) {
    Tensor codes = codes_of(weight, layout);
    sums = aten_int_mm(codes_of(tokens, layout), torch::stable::transpose(codes, 0, 1));
  }
  scope.check(launch_int8_linear(tokens.const_data_ptr<uint8_t>(), M, weight.const_data_ptr<uint8_t>(), N, layout,
                                 sums ? sums->const_data_ptr<int32_t>() : nullptr, dtype, bias ? added.const_data_ptr() : nullptr,
                                 output.mutable_data_ptr(), scope.stream()));
  return output;
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) { halfbyte::impl_both(m, "int8_linear", TORCH_BOX(&halfbyte::cuda::int8_linear)); }
