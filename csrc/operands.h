// Checks of whole operand lists, shared by the fronts of every device: one text per rule.
#pragma once

#include <optional>
#include <vector>

#include "bridge.h"
#include "checks.h"
#include "dropout.h"

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

// input of quantize_list, of one dtype and on one device. Returns the layouts of their rows.
inline std::vector<RowLayout> checked_input_list(const char* op, const std::vector<Tensor>& input, int64_t format,
                                                 int64_t block_size) {
  std::vector<RowLayout> layouts;
  for (size_t i = 0; i < input.size(); ++i) {
    const Operand name("input", i), first("input", 0);
    HALFBYTE_CHECK(input[i].dim() >= 2, op, name, " must have at least 2 dimensions, got shape ", shape_text(input[i]));
    checked_dtype(op, name, input[i].scalar_type());
    HALFBYTE_CHECK(input[i].scalar_type() == input[0].scalar_type(), op, name, " must have the dtype of ", first, ", ",
                   dtype_name(input[0].scalar_type()), ", got ", dtype_name(input[i].scalar_type()));
    check_same_device(op, name, input[i], first, input[0]);
    layouts.push_back(checked_layout(op, format, block_size, input[i].size(input[i].dim() - 1), {"in_features", i}));
  }
  return layouts;
}

// packed of dequantize_list, each with its own in_features, all on one device. Returns their layouts.
inline std::vector<RowLayout> checked_packed_list(const char* op, const std::vector<Tensor>& packed, int64_t format,
                                                  int64_t block_size, const std::vector<int64_t>& in_features) {
  HALFBYTE_CHECK(in_features.size() == packed.size(), op, "in_features must have one entry per tensor of packed, ", packed.size(),
                 ", got ", in_features.size());
  std::vector<RowLayout> layouts;
  for (size_t i = 0; i < packed.size(); ++i) {
    layouts.push_back(checked_layout(op, format, block_size, in_features[i], {"in_features", i}));
    check_packed(op, packed[i], layouts[i], 2, {"packed", i});
    check_same_device(op, {"packed", i}, packed[i], {"packed", 0}, packed[0]);
  }
  return layouts;
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

// The sizes of a product that is only planned: their products stay below 2^63.
inline void check_planned_size(const char* op, const char* name, int64_t size) {
  HALFBYTE_CHECK(size >= 0 && size <= (int64_t(1) << 30), op, name, " must be from 0 to 2^30, got ", size);
}

inline RowLayout checked_plan(const char* op, int64_t tokens, int64_t rows, int64_t rank, int64_t format, int64_t block_size,
                              int64_t in_features) {
  check_planned_size(op, "tokens", tokens);
  check_planned_size(op, "rows", rows);
  check_planned_size(op, "rank", rank);
  check_planned_size(op, "in_features", in_features);
  return checked_layout(op, format, block_size, in_features);
}

// As checked_linear for int8 rows; int8_linear's sums are int32, and 127 * 128 * 2^17 is below 2^31.
inline RowLayout checked_int8_linear(const char* op, const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias,
                                     int64_t in_features) {
  constexpr int64_t most = int64_t(1) << 17;
  const RowLayout layout = checked_linear(op, input, packed, bias, kInt8, 0, in_features);
  HALFBYTE_CHECK(in_features <= most, op, "in_features must be at most ", most, " (the sums are int32), got ", in_features);
  return layout;
}

inline RowLayout checked_linear_backward(const char* op, const Tensor& grad_output, const Tensor& packed, int64_t format,
                                         int64_t block_size, int64_t in_features) {
  const RowLayout layout = checked_product(op, "grad_output", grad_output, packed, format, block_size, in_features);
  HALFBYTE_CHECK(grad_output.size(grad_output.dim() - 1) == packed.size(0), op, "grad_output's last dimension must be out_features=",
                 packed.size(0), ", got shape ", shape_text(grad_output));
  return layout;
}

// The dtype of x @ lora_A^T and of the gradients of lora_A and lora_B: theirs or the input's, whichever holds the other.
inline ScalarType lora_dtype(const Tensor& input, const Tensor& lora_A) {
  return input.scalar_type() == lora_A.scalar_type() ? input.scalar_type() : ScalarType::Float;
}

// splits: rows of packed in each group, empty for one group. Returns the rows of each group.
inline std::vector<int64_t> checked_splits(const char* op, const std::vector<int64_t>& splits, int64_t rows) {
  const std::vector<int64_t> groups = splits.empty() ? std::vector<int64_t>{rows} : splits;
  int64_t total = 0;
  for (const int64_t size : groups) {
    HALFBYTE_CHECK(size >= 0 && size <= rows, op, "splits must be from 0 to ", rows, " (the rows of packed), got ", size);
    total += size;
  }
  HALFBYTE_CHECK(total == rows, op, "splits must add up to ", rows, " (the rows of packed), got ", total);
  return groups;
}

// The sizes of dropout_mask's result.
inline std::vector<int64_t> checked_mask_sizes(const Tensor& input, const Tensor& seed, double p) {
  constexpr const char* op = "dropout_mask";
  HALFBYTE_CHECK(input.dim() >= 1, op, "input must have at least 1 dimension, got shape ", shape_text(input));
  HALFBYTE_CHECK(seed.scalar_type() == ScalarType::Long && seed.numel() == 1, op, "seed must be one int64, got ",
                 dtype_name(seed.scalar_type()), " of shape ", shape_text(seed));
  HALFBYTE_CHECK(p >= 0.0 && p <= 1.0, op, "p must be from 0 to 1, got ", p);
  check_same_device(op, "seed", seed, "input", input);
  return with_last_size(input, mask_bytes(input.size(input.dim() - 1)));
}

// mask (..., ceil(K / 8)) for elements (..., K) beside `like`, or none.
inline std::optional<Tensor> checked_mask(const char* op, const Tensor& like, int64_t columns, const std::optional<Tensor>& mask) {
  if (!mask) return std::nullopt;
  HALFBYTE_CHECK(mask->scalar_type() == ScalarType::Byte, op, "mask must be uint8, got ", dtype_name(mask->scalar_type()));
  HALFBYTE_CHECK(std::vector<int64_t>(mask->sizes().begin(), mask->sizes().end()) == with_last_size(like, mask_bytes(columns)), op,
                 "mask must have a bit for each of ", columns, " columns, ", mask_bytes(columns), " bytes beside the leading dimensions of ",
                 shape_text(like), ", got shape ", shape_text(*mask));
  check_same_device(op, "mask", *mask, "input", like);
  return as_contiguous(*mask);
}

// lora_A (groups * rank, K) and lora_B (N, rank) of one dtype. Returns the rows of each group.
inline std::vector<int64_t> checked_lora(const char* op, const Tensor& input, const Tensor& packed, const Tensor& lora_A,
                                         const Tensor& lora_B, const std::vector<int64_t>& splits, int64_t in_features) {
  const int64_t rows = packed.size(0);
  const std::vector<int64_t> groups = checked_splits(op, splits, rows);
  checked_dtype(op, "lora_A", lora_A.scalar_type());
  HALFBYTE_CHECK(lora_B.scalar_type() == lora_A.scalar_type(), op, "lora_B must have lora_A's dtype ",
                 dtype_name(lora_A.scalar_type()), ", got ", dtype_name(lora_B.scalar_type()));
  HALFBYTE_CHECK(lora_B.dim() == 2 && lora_B.size(0) == rows && lora_B.size(1) >= 1, op, "lora_B must have shape (", rows,
                 ", rank) with a rank of at least 1, got ", shape_text(lora_B));
  const int64_t stacked = int64_t(groups.size()) * lora_B.size(1);
  HALFBYTE_CHECK(lora_A.dim() == 2 && lora_A.size(0) == stacked && lora_A.size(1) == in_features, op, "lora_A must have shape (",
                 stacked, ", ", in_features, "): one block of ", lora_B.size(1), " rows per group, got ", shape_text(lora_A));
  check_same_device(op, "lora_A", lora_A, "input", input);
  check_same_device(op, "lora_B", lora_B, "input", input);
  return groups;
}

// grad_projected (..., R) beside grad_output (..., N), lora_A (R, K).
inline void checked_lora_backward(const char* op, const Tensor& grad_output, const Tensor& grad_projected, const Tensor& lora_A,
                                  int64_t in_features) {
  checked_dtype(op, "lora_A", lora_A.scalar_type());
  checked_dtype(op, "grad_projected", grad_projected.scalar_type());
  HALFBYTE_CHECK(lora_A.dim() == 2 && lora_A.size(0) >= 1 && lora_A.size(1) == in_features, op,
                 "lora_A must have shape (rank, ", in_features, ") with a rank of at least 1, got ", shape_text(lora_A));
  HALFBYTE_CHECK(with_last_size(grad_output, lora_A.size(0)) ==
                     std::vector<int64_t>(grad_projected.sizes().begin(), grad_projected.sizes().end()),
                 op, "grad_projected must have grad_output's shape with the last dimension replaced by ", lora_A.size(0),
                 " (lora_A's rows), got grad_output ", shape_text(grad_output), " and grad_projected ", shape_text(grad_projected));
  check_same_device(op, "grad_projected", grad_projected, "grad_output", grad_output);
  check_same_device(op, "lora_A", lora_A, "grad_output", grad_output);
}

// grad_output (..., N), input (..., K), projected (..., groups * rank) and its gradient, lora_B (N, rank). Returns the rows of each group.
inline std::vector<int64_t> checked_lora_adapter(const char* op, const Tensor& grad_output, const Tensor& input, const Tensor& projected,
                                                 const Tensor& lora_B, const std::optional<Tensor>& grad_projected,
                                                 const std::vector<int64_t>& splits) {
  const auto sizes = [](const Tensor& t) { return std::vector<int64_t>(t.sizes().begin(), t.sizes().end()); };
  checked_dtype(op, "input", input.scalar_type());
  checked_dtype(op, "lora_B", lora_B.scalar_type());
  HALFBYTE_CHECK(grad_output.scalar_type() == input.scalar_type(), op, "grad_output must have input's dtype ",
                 dtype_name(input.scalar_type()), ", got ", dtype_name(grad_output.scalar_type()));
  HALFBYTE_CHECK(projected.scalar_type() == lora_dtype(input, lora_B), op, "projected must be ", dtype_name(lora_dtype(input, lora_B)),
                 " (lora_linear's second result), got ", dtype_name(projected.scalar_type()));
  HALFBYTE_CHECK(input.dim() >= 1, op, "input must have at least 1 dimension, got shape ", shape_text(input));
  HALFBYTE_CHECK(lora_B.dim() == 2 && lora_B.size(1) >= 1, op,
                 "lora_B must have shape (out_features, rank) with a rank of at least 1, got ", shape_text(lora_B));
  const int64_t rows = lora_B.size(0);
  const std::vector<int64_t> groups = checked_splits(op, splits, rows);
  const int64_t stacked = int64_t(groups.size()) * lora_B.size(1);
  HALFBYTE_CHECK(sizes(grad_output) == with_last_size(input, rows), op, "grad_output must have input's shape with the last dimension ",
                 "replaced by ", rows, " (lora_B's rows), got input ", shape_text(input), " and grad_output ", shape_text(grad_output));
  HALFBYTE_CHECK(sizes(projected) == with_last_size(input, stacked), op, "projected must have input's shape with the last dimension ",
                 "replaced by ", stacked, " (one rank of lora_B per group), got input ", shape_text(input), " and projected ",
                 shape_text(projected));
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_same_device(op, "projected", projected, "input", input);
  check_same_device(op, "lora_B", lora_B, "input", input);
  if (grad_projected) {
    HALFBYTE_CHECK(grad_projected->scalar_type() == projected.scalar_type() && sizes(*grad_projected) == sizes(projected), op,
                   "grad_projected must have projected's dtype and shape, ", dtype_name(projected.scalar_type()), " ",
                   shape_text(projected), ", got ", dtype_name(grad_projected->scalar_type()), " ", shape_text(*grad_projected));
    check_same_device(op, "grad_projected", *grad_projected, "input", input);
  }
  return groups;
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
