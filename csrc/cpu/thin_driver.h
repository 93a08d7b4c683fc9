// Thin products on whole matrices: the small operand is copied once, the other one is shared out over threads.
#pragma once

#include "../dropout.h"
#include "product_driver.h"

namespace halfbyte::cpu {

// Rows of elements, `stride` of them apart; with a mask of dropout, dropped ones are zeros.
struct MatrixView {
  const void* data;
  DType dtype;
  int64_t rows, columns, stride;
  const uint8_t* mask = nullptr;

  const void* at(int64_t row, int64_t column) const {
    return static_cast<const char*>(data) + (row * stride + column) * (dtype == DType::kFloat32 ? 4 : 2);
  }
  // Of a view without a mask.
  MatrixView part(int64_t row, int64_t row_count, int64_t column, int64_t column_count) const {
    return {at(row, column), dtype, row_count, column_count, stride};
  }
  // From an element on; with a mask its column is a multiple of 8.
  ThinMatrix from(int64_t row, int64_t column) const {
    const int64_t bytes = mask_bytes(columns);
    return {at(row, column), dtype, stride, mask ? mask + row * bytes + column / 8 : nullptr, bytes};
  }
};

// A contiguous tensor (..., columns).
inline MatrixView matrix_view(const char* op, const char* name, const Tensor& t) {
  const int64_t columns = t.size(t.dim() - 1);
  return {t.const_data_ptr(), checked_dtype(op, name, t.scalar_type()), leading_numel(t), columns, columns};
}
inline MatrixView matrix_view(const char* op, const char* name, const Tensor& t, const std::optional<Tensor>& mask) {
  MatrixView view = matrix_view(op, name, t);
  if (mask) view.mask = mask->const_data_ptr<uint8_t>();
  return view;
}

// A thin operand as the kernels take it.
struct ThinFloats {
  Tensor floats;
  int64_t stride;

  float* row(int64_t r) const { return static_cast<float*>(floats.mutable_data_ptr()) + r * stride; }
};

// (rows, stride) of floats, zeros past the first `given` rows.
inline ThinFloats thin_floats(const Tensor& like, int64_t given, int64_t rows, int64_t stride) {
  ThinFloats thin{new_tensor(like, {rows, stride}, ScalarType::Float), stride};
  std::fill(thin.row(given), thin.row(rows), 0.0f);
  return thin;
}

// Whole vectors, and no power of two: rows that far apart would share a set of L1.
inline int64_t thin_stride(int64_t columns) { return round_up(columns, kernels().thin.lanes) + kernels().thin.lanes; }

// Rows that a thread should get at least, by the multiply-adds in each: waking a thread takes as long as a million.
inline int64_t thin_grain(int64_t work_per_row) { return 1 + (int64_t(1) << 20) / std::max<int64_t>(work_per_row, 1); }

// weight (ranks, columns) for thin_project.
inline ThinFloats thin_weight(const Tensor& like, const MatrixView& weight) {
  const ThinKernels& table = kernels().thin;
  const ThinFloats thin = thin_floats(like, weight.rows, round_up(weight.rows, table.ranks), thin_stride(weight.columns));
  parallel_rows(weight.rows, thin_grain(weight.columns), [&](int64_t begin, int64_t end) {
    table.prepare(weight.at(begin, 0), weight.dtype, weight.stride, end - begin, weight.columns, 1.0f, thin.stride, thin.row(begin));
  });
  return thin;
}

// matrix (columns, ranks), times `factor`, for thin_project by its transpose.
inline ThinFloats thin_weight_turned(const Tensor& like, const MatrixView& matrix, float factor) {
  const ThinKernels& table = kernels().thin;
  const ThinFloats thin = thin_floats(like, matrix.columns, round_up(matrix.columns, table.ranks), thin_stride(matrix.rows));
  parallel_blocks(thin.stride, table.lanes, thin_grain(matrix.columns), [&](int64_t begin, int64_t end) {
    table.prepare_turned(matrix.data, matrix.dtype, matrix.stride, matrix.rows, matrix.columns, factor, begin, end, thin.stride,
                         thin.row(0));
  });
  return thin;
}

// matrix (tokens, ranks), times `factor`, for thin_gradient.
inline ThinFloats thin_tokens(const Tensor& like, const MatrixView& matrix, float factor) {
  const ThinKernels& table = kernels().thin;
  const ThinFloats thin = thin_floats(like, matrix.rows, matrix.rows, round_up(matrix.columns, table.ranks));
  table.prepare(matrix.data, matrix.dtype, matrix.stride, matrix.rows, matrix.columns, factor, thin.stride, thin.row(0));
  return thin;
}

// out (rows, ranks), `out_stride` floats apart, = matrix (rows, columns) @ weight (ranks, columns)^T
inline void thin_project(const MatrixView& matrix, const ThinFloats& weight, int64_t ranks, float* out, int64_t out_stride) {
  const ThinKernels& table = kernels().thin;
  parallel_rows(matrix.rows, thin_grain(matrix.columns * ranks), [&](int64_t begin, int64_t end) {
    table.project(matrix.from(begin, 0), end - begin, matrix.columns, weight.row(0), weight.stride, ranks, out + begin * out_stride,
                  out_stride);
  });
}

// out[r * rank_stride + c * column_stride] = (thin (rows, ranks)^T @ matrix (rows, columns))[r, c], in `dtype`
inline void thin_gradient(const MatrixView& matrix, const ThinFloats& thin, int64_t ranks, void* out, DType dtype, int64_t rank_stride,
                          int64_t column_stride) {
  const ThinKernels& table = kernels().thin;
  parallel_blocks(matrix.columns, table.columns, thin_grain(table.columns * matrix.rows * ranks), [&](int64_t begin, int64_t end) {
    void* to = static_cast<char*>(out) + begin * column_stride * (dtype == DType::kFloat32 ? 4 : 2);
    table.gradient(matrix.from(0, begin), matrix.rows, end - begin, thin.row(0), thin.stride, ranks, to, dtype, rank_stride,
                   column_stride);
  });
}

// out (rows, columns) += what `mask` keeps of left (rows, ranks) @ weight (ranks, columns)
inline void thin_add_kept(const ThinFloats& left, const ThinFloats& weight, int64_t ranks, const Tensor& mask, int64_t columns,
                          const LinearOutput& out) {
  const int64_t bytes = mask_bytes(columns), row_bytes = out.stride * (out.dtype == DType::kFloat32 ? 4 : 2);
  parallel_rows(left.floats.size(0), thin_grain(columns * ranks), [&](int64_t begin, int64_t end) {
    LinearOutput rows = out;
    rows.data = static_cast<char*>(out.data) + begin * row_bytes;
    kernels().thin.add_kept(left.row(begin), left.stride, weight.row(0), weight.stride, ranks,
                            mask.const_data_ptr<uint8_t>() + begin * bytes, bytes, end - begin, columns, rows);
  });
}

// to (rows, columns) contiguous, rounded from floats.
inline void store_rows(const ThinFloats& from, int64_t columns, const Tensor& to, DType dtype) {
  kernels().thin.store(from.row(0), from.stride, from.floats.size(0), columns, dtype, to.mutable_data_ptr());
}

}  // namespace halfbyte::cpu
