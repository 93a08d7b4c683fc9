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
  shape.units = pass_units<Product>(units, shape.units, kUnitMultiple<Product>);
  return shape;
}

// Panel unit u and column c lie at run c / kRun, then u, then c % kRun. row(n, place) puts vector i of group g of row n to place(g, i), for
// all groups of the panel's columns, but for the second half of the last one if they end before it; one row after the other, as they lie
// in memory: of two at once the CPU would not see what comes next. Not inline: it needs all registers.
template <class Product, class Row>
[[gnu::noinline]] void fill_panel(int64_t rows, int64_t n0, int64_t units, int64_t columns, const ColumnShape& shape, float* panel,
                                  const Row& row) {
  using Values = typename Product::Values;
  constexpr int kElements = Product::kUnitElements;
  constexpr int64_t kRun = ColumnLayout<Product>::kRun;
  static_assert(kGroup == 8 * kLanes);
  static_assert(kGroup % kRun == 0);
  static_assert(kElements == 2 || kUnitMultiple<Product> == 1);  // each unit a row that there is
  const int64_t run_floats = kRun * shape.padded_units();
  for (int64_t u = 0; u < units; ++u, panel += kRun) {
    const auto place = [&](int64_t g, int i) __attribute__((always_inline)) {
      return panel + g * (kGroup / kRun * run_floats) + i * kLanes / kRun * run_floats + i * kLanes % kRun;
    };
    if constexpr (kElements == 1) {
      row(n0 + u, place);
    } else {
      alignas(64) float decoded[2][ColumnLayout<Product>::kFew.columns / 2];
      for (int e = 0; e < 2; ++e) {
        const int64_t n = n0 + 2 * u + e;
        const auto of_row = [&](int64_t g, int i) __attribute__((always_inline)) {
          return decoded[e] + (g * Product::kVectors + i) * kLanes;
        };
        if (n < rows) row(n, of_row);
        else memset(decoded[e], 0, sizeof decoded[e]);
      }
      const auto put = [&]<int kCount>(int64_t g) __attribute__((always_inline)) {
        Values even[kCount], odd[kCount], v[2 * kCount];
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) {
          even[i] = Product::load(decoded[0] + (4 * g + i) * kLanes);
          odd[i] = Product::load(decoded[1] + (4 * g + i) * kLanes);
        }
        interleave<kCount>(even, odd, v);
#pragma GCC unroll 8
        for (int i = 0; i < 2 * kCount; ++i) store_values(place(g, i), v[i]);
      };
      int64_t g = 0;
      for (; (g + 1) * kGroup - kGroup / 2 < columns; ++g) put.template operator()<4>(g);
      if (g * kGroup < columns) put.template operator()<2>(g);
    }
  }
}

// What `backward` needs for `groups` groups of columns, or some of them: of 6, say, it takes 3 at once, and 5 of 5; and for `tokens`
// tokens, or fewer: the last block of many may be few.
template <class Product>
constexpr int64_t backward_scratch_floats(int64_t tokens, int64_t rows, int64_t groups, int64_t rank) {
  const auto of = [&](int64_t count) {
    const int64_t most = backward_shape<Product>(count).columns / kGroup;
    return call_shape<Product>(count, rows, groups < most ? groups : most, rank).scratch_floats(count);
  };
  const int64_t few = of(tokens < kFewTokens ? tokens : kFewTokens), all = of(tokens);
  return few > all ? few : all;
}

template <class Product, Codes codes>
void backward(const uint8_t* packed, int64_t rows, int64_t group_begin, int64_t group_end, const RowLayout& l, const TokenUnits& grad,
              int64_t tokens, const LowRank* low_rank, const LinearOutput& output, void* scratch) {
  constexpr int kElements = Product::kUnitElements;
  constexpr int64_t kGroupUnits = kGroup / kElements;
  const Decoder<Product, codes> decoder(l);
  const ColumnShape shape = call_shape<Product>(tokens, rows, group_end - group_begin, low_rank ? low_rank->rank : 0);
  const int64_t column_groups = shape.columns / kGroup;
  [[maybe_unused]] const typename Layout<Product>::Scope scope{};
  for (int64_t g0 = group_begin; g0 < group_end; g0 += column_groups) {
    const int64_t groups = g0 + column_groups < group_end ? column_groups : group_end - g0;
    const int64_t left = l.in_features - g0 * kGroup, columns = left < groups * kGroup ? left : groups * kGroup;
    ColumnSums<Product> sums(shape, tokens, columns, output.from(0, g0 * kGroup), scratch);
    // sums += grads (tokens, reduced rows) @ rows (reduced, columns)
    const auto add = [&](int64_t reduced, const TokenUnits& grads, bool last, const auto& row) {
      const auto fill = [&](int64_t u0, int64_t units, float* panel) {
        fill_panel<Product>(reduced, u0 * kElements, units, columns, shape, panel, row);
      };
      sums.add(grads, round_up(units_of<Product>(reduced), kUnitMultiple<Product>), last, fill);
    };
    const RowPart<Product, codes> part(l, g0, groups);
    const int64_t scales = scales_at(l, g0 * kGroup);
    add(rows, grad, !low_rank, [&](int64_t n, const auto& place) __attribute__((always_inline)) {
      const uint8_t *const row = packed + n * l.row_bytes, *const next = row + kRowsAhead * l.row_bytes;
      prefetch(next + scales);
      decode_row<Product, codes, true>(decoder, row, l, part, place, nullptr, next + g0 * Decoder<Product, codes>::kCodeBytes);
    });
    if (low_rank) {
      add(low_rank->rank, {low_rank->input, low_rank->as_it_lies}, true, [&](int64_t n, const auto& place) {
        const float* source = static_cast<const float*>(low_rank->weight) + n * low_rank->stride + g0 * kGroupUnits;
        constexpr int kVectors = kGroupUnits / kLanes;
        for (int64_t g = 0; g < groups; ++g)
#pragma GCC unroll 8
          for (int i = 0; i < kVectors; ++i) store_values(place(g, i), Product::load(source + (g * kVectors + i) * kLanes));
      });
    }
  }
}

}  // namespace
}  // namespace halfbyte::cpu
