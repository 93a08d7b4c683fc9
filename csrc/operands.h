// Checks of whole operand lists, shared by the fronts of every device: one text per rule.
#pragma once

#include <optional>
#include <vector>

#include "bridge.h"
#include "checks.h"

namespace halfbyte {

// scales of quantize_with_scales: float32, input's shape with the last dimension replaced by the number of blocks.
inline void check_scales(const char* op, const Tensor& input, const Tensor& scales, const RowLayout& layout) {
  HALFBYTE_CHECK(scales.scalar_type() == ScalarType::Float, op, "scales must be float32, got ", dtype_name(scales.scalar_type()));
  check_same_device(op, "input", input, "scales", scales);
  HALFBYTE_CHECK(with_last_size(input, layout.num_blocks) == std::vector<int64_t>(scales.sizes().begin(), scales.sizes().end()),
                 op, "scales must have input's shape with the last dimension replaced by ", layout.num_blocks,
                 " (one absmax per block), got input ", shape_text(input), " and scales ", shape_text(scales));
}

// packed that quantize_ writes: input's rows, each of layout.row_bytes, one after the other.
inline void check_target(const char* op, const Tensor& packed, const Tensor& input, const RowLayout& layout) {
  check_same_device(op, "input", input, "packed", packed);
  check_packed(op, packed, layout);
  HALFBYTE_CHECK(with_last_size(input, layout.row_bytes) == std::vector<int64_t>(packed.sizes().begin(), packed.sizes().end()),
                 op, "packed must have input's shape with the last dimension replaced by ", layout.row_bytes, ", got input ",
                 shape_text(input), " and packed ", shape_text(packed));
  HALFBYTE_CHECK(packed.is_contiguous(), op, "packed must be contiguous: its rows are written where they are");
}

// t (input or grad_output) against a packed weight (out_features, row_bytes).
inline RowLayout checked_product(const char* op, const char* name, const Tensor& t, const Tensor& packed, int64_t format,
                                 int64_t block_size, int64_t in_features) {
  const RowLayout layout = checked_layout(op, format, block_size, in_features);
  checked_dtype(op, name, t.scalar_type());
  HALFBYTE_CHECK(t.dim() >= 1, op, name, " must have at least 1 dimension, got shape ", shape_text(t));
  check_same_device(op, name, t, "packed", packed);
  check_packed(op, packed, layout);
  HALFBYTE_CHECK(packed.dim() == 2, op, "packed must have 2 dimensions (out_features, row_bytes), got shape ", shape_text(packed));
  return layout;
}

inline RowLayout checked_linear(const char* op, const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias,
                                int64_t format, int64_t block_size, int64_t in_features) {
  const RowLayout layout = checked_product(op, "input", input, packed, format, block_size, in_features);
  HALFBYTE_CHECK(input.size(input.dim() - 1) == in_features, op, "input's last dimension must be in_features=", in_features,
                 ", got shape ", shape_text(input));
  if (bias) {
    HALFBYTE_CHECK(bias->scalar_type() == input.scalar_type(), op, "bias must have input's dtype ", dtype_name(input.scalar_type()),
                   ", got ", dtype_name(bias->scalar_type()));
    HALFBYTE_CHECK(bias->dim() == 1 && bias->size(0) == packed.size(0), op, "bias must have shape (", packed.size(0),
                   ",), got ", shape_text(*bias));
    check_same_device(op, "bias", *bias, "packed", packed);
  }
  return layout;
}

inline RowLayout checked_linear_backward(const char* op, const Tensor& grad_output, const Tensor& packed, int64_t format,
                                         int64_t block_size, int64_t in_features) {
  const RowLayout layout = checked_product(op, "grad_output", grad_output, packed, format, block_size, in_features);
  HALFBYTE_CHECK(grad_output.size(grad_output.dim() - 1) == packed.size(0), op, "grad_output's last dimension must be out_features=",
                 packed.size(0), ", got shape ", shape_text(grad_output));
  return layout;
}

// packed (num_embeddings, row_bytes) and integer indices; true when they are int64.
inline bool checked_embedding(const char* op, const Tensor& indices, const Tensor& packed, const RowLayout& layout) {
  check_same_device(op, "indices", indices, "packed", packed);
  check_packed(op, packed, layout);
  HALFBYTE_CHECK(packed.dim() == 2, op, "packed must have 2 dimensions (num_embeddings, row_bytes), got shape ", shape_text(packed));
  const bool wide = indices.scalar_type() == ScalarType::Long;
  HALFBYTE_CHECK(wide || indices.scalar_type() == ScalarType::Int, op, "indices must be int64 or int32, got ",
                 dtype_name(indices.scalar_type()));
  return wide;
}

}  // namespace halfbyte
