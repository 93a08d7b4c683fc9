// The gradients of a LoRA adapter in aten's products, for CPUs whose bf16 units these use.
#pragma once

#include "../operands.h"

namespace halfbyte {

// t * factor in t's dtype, the product rounded once.
inline Tensor scaled(const Tensor& t, double factor) {
  Tensor scalar = torch::stable::new_empty(t, {}, ScalarType::Float);
  torch::stable::fill_(scalar, factor);
  return aten_mul(t, scalar);
}

// Results of lora_linear_backward_adapter; `groups`: checked_lora_adapter's.
inline std::tuple<Tensor, Tensor, Tensor> adapter_gradients(const Tensor& grad_output, const Tensor& input, const Tensor& projected,
                                                            const Tensor& lora_B, const std::optional<Tensor>& grad_projected,
                                                            double scaling, const std::vector<int64_t>& groups, bool needs_A,
                                                            bool needs_B) {
  const ScalarType dtype = projected.scalar_type();
  const int64_t tokens = leading_numel(input), rank = lora_B.size(1), stacked = int64_t(groups.size()) * rank;
  const auto matrix = [&](const Tensor& t) {
    return torch::stable::to(torch::stable::reshape(t, {tokens, t.size(t.dim() - 1)}), dtype);
  };
  const auto joined = [&](const std::vector<Tensor>& parts, int64_t dim) {
    return scaled(parts.size() == 1 ? parts[0] : aten_cat(parts, dim), scaling);
  };
  const Tensor nothing = new_tensor(lora_B, {0}, lora_B.scalar_type());
  Tensor grad = matrix(grad_output), coefficients = matrix(projected), weight = torch::stable::to(lora_B, dtype);
  std::vector<Tensor> of_projected, of_B;
  int64_t first = 0;
  for (size_t g = 0; g < groups.size(); first += groups[g++]) {
    Tensor rows = torch::stable::narrow(grad, 1, first, groups[g]);
    of_projected.push_back(aten_matmul(rows, torch::stable::narrow(weight, 0, first, groups[g])));
    if (needs_B)
      of_B.push_back(aten_matmul(torch::stable::transpose(rows, 0, 1),
                                 torch::stable::narrow(coefficients, 1, int64_t(g) * rank, rank)));
  }
  Tensor low = joined(of_projected, 1);
  if (grad_projected) low = torch::stable::subtract(low, matrix(*grad_projected), -1.0);
  const auto gradient = [&](const Tensor& t) { return as_contiguous(torch::stable::to(t, lora_B.scalar_type())); };
  const Tensor grad_A = needs_A ? gradient(aten_matmul(torch::stable::transpose(low, 0, 1), matrix(input))) : nothing;
  return {torch::stable::reshape(low, with_last_size(projected, stacked)), grad_A, needs_B ? gradient(joined(of_B, 0)) : nothing};
}

}  // namespace halfbyte
