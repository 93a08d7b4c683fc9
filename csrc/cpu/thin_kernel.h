// Thin products (thin_kernels.h): fused multiply-adds in fp32 on rows as they lie. Included once per ISA, after linear_decode_<isa>.h.
#pragma once

#include "linear_kernel.h"
#include "linear_products.h"
#include "thin_kernels.h"

namespace halfbyte::cpu {
namespace {
namespace thin {

constexpr int kRanks = kLanes == 16 ? 8 : 4;  // by 3 tokens or vectors: the sums that registers hold
constexpr int kTokens = 3, kVectors = 3;
constexpr int kColumns = kVectors * kLanes;
constexpr int64_t kTogether = 512;  // columns of a thin operand that stay in L1, tokens that a sum adds up in registers
constexpr int64_t kBlock = 48;      // tokens that meet them

// The first `count` elements of a vector, zeros after them.
template <class T>
inline Vector load_first(const T* x, int64_t count) {
  T padded[kLanes] = {};
  memcpy(padded, x, size_t(count) * sizeof(T));
  return load_floats(padded);
}

// The bits of the lanes from `first` on, a multiple of kLanes, in a mask's row; `count` lanes at least.
inline uint32_t mask_bits(const uint8_t* mask, int64_t first, int64_t count) {
  uint32_t word = 0;
  memcpy(&word, mask + first / 8, kLanes < 8 ? 1 : size_t(count + 7) / 8);
  return kLanes < 8 ? word >> first % 8 : word;
}

// Elements as vectors of floats, dropped ones as zeros.
template <class T, bool kMasked>
struct Rows {
  const T* data;
  int64_t stride;
  const uint8_t* mask;
  int64_t mask_stride;
  int64_t column = 0;  // of data[0] in the mask

  Rows at(int64_t m, int64_t c) const {
    return {data + m * stride + c, stride, kMasked ? mask + m * mask_stride : nullptr, mask_stride, column + c};
  }
  Vector kept(Vector v, int64_t m, int64_t c, int64_t count) const {
    if constexpr (kMasked) return keep_lanes(v, mask_bits(mask + m * mask_stride, column + c, count));
    else return v;
  }
  Vector load(int64_t m, int64_t c) const {
    return kept(load_floats(data + m * stride + c), m, c, kLanes);
  }
  Vector load(int64_t m, int64_t c, int64_t count) const {
    return kept(load_first(data + m * stride + c, count), m, c, count);
  }
};

// body(Rows) for the element type, with a mask or without.
template <class Body>
inline void with_rows(const ThinMatrix& matrix, const Body& body) {
  with_elements(matrix.data, matrix.dtype, [&]<class T>(const T* data) {
    if (matrix.mask) body(Rows<T, true>{data, matrix.stride, matrix.mask, matrix.mask_stride});
    else body(Rows<T, false>{data, matrix.stride, nullptr, 0});
  });
}

inline Vector scaled(Vector v, Vector factor) { return Float32::multiply_add(v, factor, zero_vector()); }

template <class T>
inline void prepare_row(const T* x, int64_t columns, Vector factor, int64_t stride, float* out) {
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) store_values(out + c, scaled(load_floats(x + c), factor));
  float rest[kLanes] = {};
  if (c < columns) store_values(rest, scaled(load_first(x + c, columns - c), factor));
  for (int i = 0; c < stride; ++c, ++i) out[c] = i < kLanes ? rest[i] : 0.0f;
}

void prepare(const void* matrix, DType dtype, int64_t row_stride, int64_t rows, int64_t columns, float factor, int64_t stride,
             float* out) {
  with_elements(matrix, dtype, [&]<class T>(const T* x) {
    for (int64_t r = 0; r < rows; ++r) prepare_row(x + r * row_stride, columns, Float32::broadcast(&factor), stride, out + r * stride);
  });
}

void prepare_turned(const void* matrix, DType dtype, int64_t row_stride, int64_t rows, int64_t columns, float factor,
                    int64_t row_begin, int64_t row_end, int64_t stride, float* out) {
  constexpr int64_t kStride = kLanes + 16;
  float block[kLanes * kStride], turned[kLanes * kLanes];
  with_elements(matrix, dtype, [&]<class T>(const T* x) {
    for (int64_t r = row_begin; r < row_end; r += kLanes) {
      const int64_t height = r + kLanes <= row_end ? kLanes : row_end - r, given = rows < r ? 0 : rows - r;
      for (int64_t c = 0; c < columns; c += kLanes) {
        const int64_t width = c + kLanes <= columns ? kLanes : columns - c;
        for (int64_t i = 0; i < kLanes; ++i) {
          const T* from = x + (r + i) * row_stride + c;
          const Vector v = i >= given ? zero_vector() : width == kLanes ? load_floats(from) : load_first(from, width);
          store_values(block + i * kStride, scaled(v, Float32::broadcast(&factor)));
        }
        if (width == kLanes && height == kLanes) {
          turn(block, kStride, out + c * stride + r, stride);
          continue;
        }
        turn(block, kStride, turned, kLanes);
        for (int64_t i = 0; i < width; ++i) memcpy(out + (c + i) * stride + r, turned + i * kLanes, size_t(height) * sizeof(float));
      }
    }
  });
}

// out (M, ranks) (+)= x (M, columns) @ w (kRanks, columns)^T
template <int M, class X>
inline void project_tile(const X& x, int64_t columns, const float* w, int64_t w_stride, int64_t ranks, float* out,
                         int64_t out_stride, bool first) {
  Vector sum[M][kRanks];
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < kRanks; ++r) sum[m][r] = zero_vector();
  const auto add = [&](int64_t k, const Vector v[M]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRanks; ++r) {
      const Vector b = Float32::load(w + r * w_stride + k);
#pragma GCC unroll 3
      for (int m = 0; m < M; ++m) sum[m][r] = Float32::multiply_add(v[m], b, sum[m][r]);
    }
  };
  Vector v[M];
  int64_t k = 0;
  for (; k + kLanes <= columns; k += kLanes) {
#pragma GCC unroll 3
    for (int m = 0; m < M; ++m) v[m] = x.load(m, k);
    add(k, v);
  }
  if (k < columns) {
    for (int m = 0; m < M; ++m) v[m] = x.load(m, k, columns - k);
    add(k, v);
  }
  float sums[M][kRanks];
#pragma GCC unroll 3
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int r = 0; r < kRanks; ++r) sums[m][r] = horizontal_sum(sum[m][r]);
  for (int m = 0; m < M; ++m)
    for (int64_t r = 0; r < kRanks && r < ranks; ++r) {
      float& to = out[m * out_stride + r];
      to = first ? sums[m][r] : to + sums[m][r];
    }
}

void project(const ThinMatrix& matrix, int64_t tokens, int64_t columns, const float* w, int64_t w_stride, int64_t ranks, float* out,
             int64_t out_stride) {
  with_rows(matrix, [&](const auto& all) {
    for (int64_t begin = 0; begin < tokens; begin += kBlock) {
      const int64_t end = begin + kBlock < tokens ? begin + kBlock : tokens;
      for (int64_t k = 0; k == 0 || k < columns; k += kTogether) {
        const int64_t count = k + kTogether < columns ? kTogether : columns - k;
        for (int64_t r = 0; r < ranks; r += kRanks) {
          for (int64_t m = begin; m < end; m += kTokens) {
            with_count<kTokens>(end - m < kTokens ? end - m : kTokens, [&]<int M>() {
              project_tile<M>(all.at(m, k), count, w + r * w_stride + k, w_stride, ranks - r, out + m * out_stride + r, out_stride,
                              k == 0);
            });
          }
        }
      }
    }
  });
}

// sums (kRanks, V vectors) += t (tokens, kRanks)^T @ y (tokens, width); kWhole: width is all of V vectors.
template <int V, bool kWhole, class Y>
inline void gradient_tile(const Y& y, int64_t tokens, int64_t width, const float* t, int64_t t_stride, float* sums) {
  constexpr int64_t kAhead = 8;  // tokens whose elements are on their way: rows are too far apart for the CPU to see
  Vector sum[kRanks][V];
#pragma GCC unroll 8
  for (int r = 0; r < kRanks; ++r)
#pragma GCC unroll 3
    for (int i = 0; i < V; ++i) sum[r][i] = Float32::load(sums + r * kColumns + i * kLanes);
  for (int64_t m = 0; m < tokens; ++m, t += t_stride) {
    Vector v[V];
#pragma GCC unroll 3
    for (int i = 0; i < V; ++i) {
      v[i] = kWhole || i < V - 1 ? y.load(m, i * kLanes) : y.load(m, i * kLanes, width - i * kLanes);
      prefetch(y.data + (m + kAhead) * y.stride + i * kLanes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRanks; ++r) {
      const Vector b = Float32::broadcast(t + r);
#pragma GCC unroll 3
      for (int i = 0; i < V; ++i) sum[r][i] = Float32::multiply_add(v[i], b, sum[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRanks; ++r)
#pragma GCC unroll 3
    for (int i = 0; i < V; ++i) store_values(sums + r * kColumns + i * kLanes, sum[r][i]);
}

// sums (kLanes, kColumns) -> out, whose ranks or columns are neighbours.
template <class T>
inline void store_gradient(const float* sums, int64_t ranks, int64_t width, T* out, int64_t rank_stride, int64_t column_stride) {
  if (column_stride == 1) {
    for (int64_t r = 0; r < ranks; ++r)
      for (int64_t c = 0; c < width; ++c) out[r * rank_stride + c] = from_float<T>(sums[r * kColumns + c]);
    return;
  }
  float turned[kLanes * kLanes];
  for (int64_t c = 0; c < width; c += kLanes) {
    turn(sums + c, kColumns, turned, kLanes);
    for (int64_t i = 0; i < kLanes && c + i < width; ++i) {
      T* to = out + (c + i) * column_stride;
      if (ranks == kRanks)  // a loop of known length becomes vectors
        for (int r = 0; r < kRanks; ++r) to[r] = from_float<T>(turned[i * kLanes + r]);
      else
        for (int64_t r = 0; r < ranks; ++r) to[r] = from_float<T>(turned[i * kLanes + r]);
    }
  }
}

void gradient(const ThinMatrix& matrix, int64_t tokens, int64_t columns, const float* t, int64_t t_stride, int64_t ranks, void* out,
              DType out_dtype, int64_t rank_stride, int64_t column_stride) {
  float sums[kLanes * kColumns];  // kRanks rows, and what `turn` reads past them
  with_rows(matrix, [&]<class Y>(const Y& all) {
    for (int64_t c = 0; c < columns; c += kColumns) {
      const int64_t width = c + kColumns < columns ? kColumns : columns - c;
      for (int64_t r = 0; r < ranks; r += kRanks) {
        memset(sums, 0, sizeof sums);
        for (int64_t m = 0; m < tokens; m += kTogether) {
          const int64_t count = m + kTogether < tokens ? kTogether : tokens - m;
          with_count<kVectors>((width + kLanes - 1) / kLanes, [&]<int V>() {
            const auto add = width == V * kLanes ? gradient_tile<V, true, Y> : gradient_tile<V, false, Y>;
            add(all.at(m, c), count, width, t + m * t_stride + r, t_stride, sums);
          });
        }
        with_elements(out, out_dtype, [&]<class U>(const U*) {
          U* to = static_cast<U*>(out) + r * rank_stride + c * column_stride;
          store_gradient(sums, ranks - r < kRanks ? ranks - r : kRanks, width, to, rank_stride, column_stride);
        });
      }
    }
  });
}

// kept (M, V vectors) = what the mask, of these columns, keeps of t (M, ranks) @ w (ranks, V vectors).
template <int M, int V>
inline void kept_tile(const float* t, int64_t t_stride, const float* w, int64_t w_stride, int64_t ranks, const uint8_t* mask,
                      int64_t mask_stride, int64_t width, float* kept) {
  Vector sum[M][V];
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < V; ++i) sum[m][i] = zero_vector();
  for (int64_t r = 0; r < ranks; ++r) {
    Vector b[V];
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) b[i] = Float32::load(w + r * w_stride + i * kLanes);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const Vector a = Float32::broadcast(t + m * t_stride + r);
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) sum[m][i] = Float32::multiply_add(a, b[i], sum[m][i]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < V; ++i) {
      const int64_t left = width - i * kLanes;
      store_values(kept + (m * V + i) * kLanes,
                   keep_lanes(sum[m][i], mask_bits(mask + m * mask_stride, i * kLanes, left < kLanes ? left : kLanes)));
    }
}

void add_kept(const float* left, int64_t left_stride, const float* w, int64_t w_stride, int64_t ranks, const uint8_t* mask,
              int64_t mask_stride, int64_t tokens, int64_t columns, const LinearOutput& out) {
  constexpr int kTokensOfTile = kLanes == 16 ? 4 : 2, kVectorsOfTile = 4, kWidth = kVectorsOfTile * kLanes;
  constexpr int64_t kColumnsTogether = 16 * kLanes;  // of the thin operand, in L1
  float kept[kTokensOfTile * kWidth];
  with_elements(out.data, out.dtype, [&]<class T>(const T*) {
    for (int64_t first = 0; first < columns; first += kColumnsTogether) {
      const int64_t end = first + kColumnsTogether < columns ? first + kColumnsTogether : columns;
      for (int64_t m = 0; m < tokens; m += kTokensOfTile) {
        const int64_t count = tokens - m < kTokensOfTile ? tokens - m : kTokensOfTile;
        for (int64_t c = first; c < end; c += kWidth) {
          const int64_t width = end - c < kWidth ? end - c : kWidth;
          with_count<kTokensOfTile>(count, [&]<int M>() {
            with_count<kVectorsOfTile>((width + kLanes - 1) / kLanes, [&]<int V>() {
              kept_tile<M, V>(left + m * left_stride, left_stride, w + c, w_stride, ranks, mask + m * mask_stride + c / 8, mask_stride,
                              width, kept);
              for (int i = 0; i < M; ++i) {
                T* row = static_cast<T*>(out.data) + (m + i) * out.stride + c;
                store_values_of_row<Float32, T, true>(kept + i * V * kLanes, width, row, row);
              }
            });
          });
        }
      }
    }
  });
}

void store(const float* floats, int64_t stride, int64_t rows, int64_t columns, DType dtype, void* out) {
  with_elements(out, dtype, [&]<class T>(const T*) {
    T* to = static_cast<T*>(out);
    for (int64_t r = 0; r < rows; ++r, floats += stride, to += columns)
      store_values_of_row<Float32, T, false>(floats, columns, nullptr, to);
  });
}

// Two bf16 products at once gain from more than 32 ranks on, and less than aten's calls cost for fewer multiply-adds than these. AMX does
// 16 times as many at once.
#if defined(HALFBYTE_TILES)
constexpr int64_t kFewRanksMost = int64_t(4) << 20;
#else
constexpr int64_t kFewRanksMost = INT64_MAX;
#endif
constexpr int64_t kManyRanksMost = int64_t(1) << 20;

constexpr ThinKernels kernels() {
  return {.ranks = kRanks,
          .lanes = kLanes,
          .columns = kColumns % 8 == 0 ? kColumns : 2 * kColumns,
          .few_ranks_most = kFewRanksMost,
          .many_ranks_most = kManyRanksMost,
          .prepare = prepare,
          .prepare_turned = prepare_turned,
          .project = project,
          .gradient = gradient,
          .add_kept = add_kept,
          .store = store};
}

}  // namespace thin
}  // namespace
}  // namespace halfbyte::cpu
