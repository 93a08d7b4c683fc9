// linear's backward: gradients times the columns of decoded rows (linear_columns.h). Included once per ISA.
#pragma once

#include "linear_columns.h"

namespace halfbyte::cpu {
namespace {

template <class Product>
constexpr const ColumnShape& backward_shape(int64_t tokens) {
  return tokens <= kFewTokens ? ColumnLayout<Product>::kFew : ColumnLayout<Product>::kMany;
}

// What `backward` takes of backward_shape: `groups` of columns in even passes, and no more units than `rows` and a low-rank part have.
template <class Product>
constexpr ColumnShape call_shape(int64_t tokens, int64_t rows, int64_t groups, int64_t rank) {
  ColumnShape shape = backward_shape<Product>(tokens);
  const int64_t most = shape.columns / kGroup, passes = (groups + most - 1) / most;
  shape.columns = (groups + passes - 1) / passes * kGroup;
  const int64_t units = round_up(units_of<Product>(rows > rank ? rows : rank), kUnitMultiple<Product>);
  if (units < shape.units) shape.units = units;
  return shape;
}

// Panel unit u and column c lie at run c / kRun, then u, then c % kRun. row(n, out) writes `groups` groups of row n in decode order; one
// row after the other, as they lie in memory: of two at once the CPU would not see what comes next.
template <class Product, class Row>
inline void fill_panel(int64_t rows, int64_t n0, int64_t units, int64_t groups, const ColumnShape& shape, float* panel,
                       const Row& row) {
  using Values = typename Product::Values;
  constexpr int kElements = Product::kUnitElements;
  constexpr int64_t kRun = ColumnLayout<Product>::kRun, kFloats = kGroup / kElements;
  static_assert(kGroup == 8 * kLanes);
  static_assert(kGroup % kRun == 0);
  alignas(64) float decoded[kElements][ColumnLayout<Product>::kFew.columns / kElements];
  const int64_t run_floats = kRun * shape.padded_units();
  for (int64_t u = 0; u < units; ++u) {
    for (int e = 0; e < kElements; ++e) {
      const int64_t n = n0 + u * kElements + e;
      if (n < rows) row(n, decoded[e]);
      else memset(decoded[e], 0, sizeof decoded[e]);
    }
    float* to = panel + u * kRun;
    for (int64_t g = 0; g < groups; ++g, to += kGroup / kRun * run_floats) {
      Values v[8];
      if constexpr (kElements == 2) {
        Values even[4], odd[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          even[i] = Product::load(decoded[0] + g * kFloats + i * kLanes);
          odd[i] = Product::load(decoded[1] + g * kFloats + i * kLanes);
        }
        interleave(even, odd, v);
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) v[i] = Product::load(decoded[0] + g * kFloats + i * kLanes);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) store_values(to + i * kLanes / kRun * run_floats + i * kLanes % kRun, v[i]);
    }
  }
}

// Sums of a half group's columns, as keep_half leaves them, where a whole group's vectors have them; the rest is waste.
template <class Product, Codes codes, class At>
inline void spread_half(const At& at, Vector v[kGroup / kLanes]) {
  constexpr bool kByLanes = kFirstHalf<Product, codes> == FirstHalf::kLanes;
  constexpr int kSpan = kByLanes ? kLanes * Product::kUnitElements : kGroup, kKept = kSpan / 2;  // columns, of which the first are there
  for (int i = 0; i < kGroup / kLanes; ++i) {
    const int span = i * kLanes / kSpan, column = i * kLanes % kSpan;
    v[i] = column < kKept ? at(span * kKept + column) : zero_vector();
  }
}

// The first `count` of a group's sums, rounded; all of them if there are no more.
template <class Product, class T>
inline void store_group(const Vector v[kGroup / kLanes], int64_t count, T* out) {
  if (count >= kGroup) {
    for (int i = 0; i < kGroup / kLanes; i += 2) store_sums_rounded<Product>(out + i * kLanes, v[i], v[i + 1]);
    return;
  }
  float sums[kGroup];
  for (int i = 0; i < kGroup / kLanes; ++i) store_values(sums + i * kLanes, v[i]);
  store_values_of_row<Product, T, false>(sums, count, nullptr, out);
}

// The sums of `tokens` tokens from m0 on and of `groups` groups from g0 on, in their own order, rounded; `half`: the last group is one.
// Not inline: where it is inlined more than once GCC keeps a group's vectors in memory.
template <class Product, Codes codes>
[[gnu::noinline]] void store_sums(const ColumnShape& shape, const float* sums, int64_t m0, int64_t tokens, int64_t g0, int64_t groups,
                                  bool half, int64_t in_features, const LinearOutput& output) {
  using L = ColumnLayout<Product>;
  with_elements(output.data, output.dtype, [&]<class T>(const T*) {
    for (int64_t m = 0; m < tokens; ++m) {
      T* row = static_cast<T*>(output.data) + (m0 + m) * output.stride + g0 * kGroup;
      for (int64_t g = 0; g < groups; ++g, row += kGroup) {
        Vector v[kGroup / kLanes];
        const auto at = [&](int64_t c) { return Product::load_sums(sums + L::sum_at(shape, m, g * kGroup + c)); };
        if (half && g == groups - 1) spread_half<Product, codes>(at, v);
        else
          for (int i = 0; i < kGroup / kLanes; ++i) v[i] = at(i * kLanes);
        restore_order<Product, codes>(v);
        store_group<Product>(v, in_features - (g0 + g) * kGroup, row);
      }
    }
  });
}

// What `backward` needs for `groups` groups of columns, or some of them: of 6, say, it takes 3 at once, and 5 of 5.
template <class Product>
constexpr int64_t backward_scratch_floats(int64_t tokens, int64_t rows, int64_t groups, int64_t rank) {
  const int64_t most = backward_shape<Product>(tokens).columns / kGroup;
  return call_shape<Product>(tokens, rows, groups < most ? groups : most, rank).scratch_floats(tokens);
}

template <class Product, Codes codes>
void backward(const uint8_t* packed, int64_t rows, int64_t group_begin, int64_t group_end, const RowLayout& l, const void* grad,
              int64_t tokens, const LowRank* low_rank, const LinearOutput& output, void* scratch) {
  constexpr int kElements = Product::kUnitElements;
  constexpr int64_t kGroupUnits = kGroup / kElements;
  const Decoder<Product, codes> decoder(l);
  const ColumnShape shape = call_shape<Product>(tokens, rows, group_end - group_begin, low_rank ? low_rank->rank : 0);
  const int64_t column_groups = shape.columns / kGroup;
  [[maybe_unused]] const typename Layout<Product>::Scope scope{};
  for (int64_t g0 = group_begin; g0 < group_end; g0 += column_groups) {
    const int64_t groups = g0 + column_groups < group_end ? column_groups : group_end - g0;
    const bool half = ends_in_half<Product, codes>(l) && (g0 + groups) * kGroup > l.in_features;  // the last of them
    const int64_t columns = groups * kGroup - (half ? kGroup / 2 : 0), left = l.in_features - g0 * kGroup;
    const int64_t stored = left < columns ? left : columns;
    ColumnSums<Product> sums(shape, tokens, columns, scratch);
    const auto target = [&](int64_t m, int64_t count) {  // with AVX-512 fetching it gains nothing, or loses
      return kLanes < 16 ? target_of(output, m, count, g0 * kGroup, stored) : Target{};
    };
    const auto finish = [&](int64_t m, int64_t count, const float* of_strip) {
      store_sums<Product, codes>(shape, of_strip, m, count, g0, groups, half, l.in_features, output);
    };
    // sums += grads (tokens, reduced rows) @ rows (reduced, columns)
    const auto add = [&](int64_t reduced, const void* grads, bool last, const auto& row) {
      const auto fill = [&](int64_t u0, int64_t units, float* panel) {
        fill_panel<Product>(reduced, u0 * kElements, units, groups, shape, panel, row);
      };
      sums.add(grads, round_up(units_of<Product>(reduced), kUnitMultiple<Product>), last, fill, target, finish);
    };
    add(rows, grad, !low_rank, [&](int64_t n, float* out) {
      const uint8_t* row = packed + n * l.row_bytes;
      const uint8_t* next = row + kRowsAhead * l.row_bytes + g0 * Decoder<Product, codes>::kCodeBytes;
      decode_row<Product, codes>(decoder, row, l, g0, groups, out, nullptr, next);
    });
    if (low_rank) {
      add(low_rank->rank, low_rank->input, true, [&](int64_t n, float* out) {
        const float* source = static_cast<const float*>(low_rank->weight) + (g0 * low_rank->rank + n) * kGroupUnits;
        for (int64_t g = 0; g < groups; ++g, source += low_rank->rank * kGroupUnits, out += kGroupUnits)
          memcpy(out, source, kGroupUnits * sizeof(float));
        if (half) keep_half<Product, codes>(out - kGroupUnits);
      });
    }
  }
}

}  // namespace
}  // namespace halfbyte::cpu
