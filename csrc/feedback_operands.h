// Checks of error_feedback's operands, shared by the fronts of every device.
#pragma once

#include "error_feedback.h"
#include "operands.h"

namespace halfbyte {

struct FeedbackOperands {
  Tensor weight, importance, candidates;
  std::optional<Tensor> factor, scales;
  RowLayout layout;
  int64_t rows;
};

inline Tensor checked_float32(const char* op, const char* name, const Tensor& t, const Tensor& weight, std::vector<int64_t> shape,
                              const char* rule) {
  HALFBYTE_CHECK(t.scalar_type() == ScalarType::Float, op, name, " must be float32, got ", dtype_name(t.scalar_type()));
  check_same_device(op, "weight", weight, name, t);
  HALFBYTE_CHECK(std::vector<int64_t>(t.sizes().begin(), t.sizes().end()) == shape, op, name, " must have shape ", rule, ", got ",
                 shape_text(t), " with weight ", shape_text(weight));
  return torch::stable::contiguous(t);
}

inline FeedbackOperands checked_feedback(const Tensor& weight, const std::optional<Tensor>& factor, const Tensor& importance,
                                         const std::optional<Tensor>& scales, const Tensor& candidates, int64_t format,
                                         int64_t block_size) {
  const char* op = "error_feedback";
  HALFBYTE_CHECK(weight.scalar_type() == ScalarType::Float, op, "weight must be float32, got ", dtype_name(weight.scalar_type()));
  HALFBYTE_CHECK(weight.dim() == 2, op, "weight must have 2 dimensions (out_features, in_features), got shape ", shape_text(weight));
  const int64_t N = weight.size(0), K = weight.size(1);
  const RowLayout layout = checked_layout(op, format, block_size, K);
  HALFBYTE_CHECK(K < (int64_t(1) << 20), op, "in_features must be below 2^20: factor has in_features^2 elements, got ", K);
  HALFBYTE_CHECK(candidates.dim() == 1, op, "candidates must have 1 dimension, got shape ", shape_text(candidates));
  HALFBYTE_CHECK(scales || candidates.size(0) > 0, op, "candidates must not be empty where no scales are given");
  FeedbackOperands o{torch::stable::contiguous(weight),
                     checked_float32(op, "importance", importance, weight, {K}, "(in_features,)"),
                     checked_float32(op, "candidates", candidates, weight, {candidates.size(0)}, "(C,)"),
                     std::nullopt,
                     std::nullopt,
                     layout,
                     N};
  if (factor) o.factor = checked_float32(op, "factor", *factor, weight, {K, K}, "(in_features, in_features)");
  if (scales) o.scales = checked_float32(op, "scales", *scales, weight, {N, layout.num_blocks}, "(out_features, num_blocks)");
  return o;
}

inline FeedbackArgs feedback_args(const FeedbackOperands& o, Tensor& targets, Tensor& chosen) {
  return {o.weight.const_data_ptr<float>(),
          o.factor ? o.factor->const_data_ptr<float>() : nullptr,
          o.importance.const_data_ptr<float>(),
          o.scales ? o.scales->const_data_ptr<float>() : nullptr,
          o.candidates.const_data_ptr<float>(),
          o.candidates.size(0),
          targets.mutable_data_ptr<float>(),
          chosen.mutable_data_ptr<float>()};
}

}  // namespace halfbyte
