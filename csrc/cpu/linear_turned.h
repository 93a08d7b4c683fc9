// linear's forward for many tokens: tokens as they lie (linear_columns.h) times panels of weights that were turned, so that a row of the
// weight is a column. Nothing is prepared for each token, and nothing turned back; each weight costs more. Included once per ISA.
#pragma once

#include "linear_columns.h"

namespace halfbyte::cpu {
namespace {

constexpr int64_t kTurnedFloats = int64_t(128) << 10;  // of a panel at most: 512 KiB

// As many columns as L2 takes of a pass.
template <class Product>
constexpr ColumnShape turned_most(int64_t rows, int64_t all_units) {
  using L = ColumnLayout<Product>;
  constexpr int64_t kRun = L::kRun, kGroupUnits = kGroup / Product::kUnitElements;
  static_assert(L::kTurnedUnits * Product::kUnitElements <= kStretch);
  const int64_t units = pass_units<Product>(all_units, L::kTurnedUnits, kGroupUnits);
  const int64_t fit = kTurnedFloats / units, all = round_up(rows, kRun);
  const int64_t most = fit < kRun ? kRun : fit < L::kTurnedColumns ? fit / kRun * kRun : L::kTurnedColumns;
  static_assert(L::kTurnedColumns % kRun == 0);
  return {all < most ? all : most, units};
}

// Of these as many columns as make even blocks of all rows.
template <class Product>
constexpr ColumnShape turned_shape(int64_t rows, int64_t all_units) {
  const ColumnShape most = turned_most<Product>(rows, all_units);
  const int64_t blocks = (rows + most.columns - 1) / most.columns;
  return {round_up((rows + blocks - 1) / blocks, ColumnLayout<Product>::kRun), most.units};
}

// What fill_turned fetches: it reads bytes [first, end) of the codes of kLanes rows, and 16 rows are too many for the CPU to see where they
// go on.
struct CodesAhead {
  const uint8_t* packed;
  int64_t row_bytes, first, end;
  // Of row r of the kLanes rows behind: scales of the elements from `element` on, and the line that the codes end in.
  void ends(int64_t r, const RowLayout& l, int64_t element) const {
    const uint8_t* row = packed + (kLanes + r) * row_bytes;
    prefetch_scales(row, l, element);
    prefetch(row + end - 1);
  }
  // Of the first row, the byte that is read 256 bytes after `at`; past the end those of the kLanes rows behind.
  const uint8_t* from(int64_t at) const {
    at += 256;
    return packed + (at < end ? at : kLanes * row_bytes + at - end + first);
  }
};

// kLanes columns of a panel's run: `count` units, of a weight's `rows` rows, the first kLanes of them at most, from unit `first` on.
template <class Product, Codes codes>
inline void fill_turned(const Decoder<Product, codes>& decoder, const uint8_t* packed, int64_t rows, const RowLayout& l, int64_t first,
                        int64_t count, float* panel) {
  using D = Decoder<Product, codes>;
  constexpr int64_t kRun = ColumnLayout<Product>::kRun, kGroupUnits = kGroup / Product::kUnitElements;
  constexpr int64_t kStride = kGroupUnits + 16;  // rows would share L1 sets
  const RowPart<Product, codes> part(l, first / kGroupUnits, (count + kGroupUnits - 1) / kGroupUnits);
  const auto byte_of = [](int64_t unit) { return unit / kGroupUnits * D::kCodeBytes; };
  const CodesAhead ahead{packed, l.row_bytes, byte_of(first), byte_of(round_up(first + count, kGroupUnits))};
  typename D::PanelScales scales[kLanes];
  for (int64_t r = 0; r < rows && r < kLanes; ++r) {
    scales[r].load(packed + r * l.row_bytes, l, part.places);
    if (kLanes == 16) ahead.ends(r, l, first * Product::kUnitElements);
  }
  alignas(64) float block[kLanes * kStride] = {};  // zeros where there is no row
  for (int64_t u = 0; u < count; u += kGroupUnits, panel += kGroupUnits * kRun) {
    const uint8_t* const next = ahead.from(byte_of(first + u));
    const int64_t g = u / kGroupUnits;
    for (int64_t r = 0; r < rows && r < kLanes; ++r) {
      for (int64_t i = 0; kLanes == 16 && i < D::kCodeBytes; i += 64) prefetch(next + r * l.row_bytes + i);
      typename Product::Values v[Product::kVectors];
      TailCodes<codes> tail;
      const uint8_t* group = codes_of_group(packed + r * l.row_bytes, l, (first + u) / kGroupUnits, tail);
      if constexpr (!D::PanelScales::kWholeRow)
        if (g == part.whole) scales[r].load_tail(packed + r * l.row_bytes, l, part.rest_places);
      decoder.template scaled<true>(group, scales[r], g < part.whole ? g : 0, v);
#pragma GCC unroll 8
      for (int i = 0; i < Product::kVectors; ++i) store_values(block + r * kStride + i * kLanes, v[i]);
    }
    for (int64_t p = 0; p < kGroupUnits; p += kLanes) {
      turn_rows([&](int i) __attribute__((always_inline)) { return Float32::load(block + i * kStride + p); },
                [&](int i, Vector column) __attribute__((always_inline)) {
                  if (u + p + i < count) store_values(panel + (p + i) * kRun, column);
                });
    }
  }
}

// Likewise where the decoder takes codes of kLanes rows that were turned by dwords, of several elements each: fewer vectors are turned, and
// none passes through memory on its way to the panel.
template <class Product, Codes codes>
  requires requires { Decoder<Product, codes>::kDwordElements; }
inline void fill_turned(const Decoder<Product, codes>& decoder, const uint8_t* packed, int64_t rows, const RowLayout& l, int64_t first,
                        int64_t count, float* panel) {
  using D = Decoder<Product, codes>;
  constexpr int64_t kRun = ColumnLayout<Product>::kRun, kOfDword = D::kDwordElements, kOfLine = kLanes * kOfDword;
  constexpr int64_t kBlock = codes == Codes::kFourBit32 ? 32 : four_bit(codes) ? 64 : kStretch;  // elements of one scale at least
  static_assert(Product::kUnitElements == 1 && kLanes == 16);
  alignas(64) float scales[(ColumnLayout<Product>::kTurnedUnits + kBlock - 1) / kBlock][kLanes] = {};  // zeros where there is no row
  if (rows > kLanes) rows = kLanes;
  const typename D::PanelScales::Places places(l, first, count);
  const CodesAhead ahead{packed, l.row_bytes, first / kOfDword * 4, (first + count + kOfDword - 1) / kOfDword * 4};
  for (int64_t r = 0; r < rows; ++r) {
    typename D::PanelScales of_row;
    of_row.load(packed + r * l.row_bytes, l, places);
    ahead.ends(r, l, first);
    for (int64_t b = 0; b * kBlock < count; ++b) scales[b][r] = D::scale_at(of_row, b * (kBlock / 32));
  }
  for (int64_t u = 0, byte = ahead.first; u < count; u += kOfLine, byte += 64, panel += kOfLine * kRun) {
    const uint8_t* const next = ahead.from(byte);
    alignas(64) float turned[kLanes * kLanes];
    turn_rows(
        [&](int r) __attribute__((always_inline)) {
          prefetch(next + r * l.row_bytes);
          return r < rows ? D::code_dwords(packed + r * l.row_bytes + byte, l.code_bytes - byte) : zero_vector();
        },
        [&](int i, Vector dwords) __attribute__((always_inline)) { store_values(turned + i * kLanes, dwords); });
    const int64_t line = count - u < kOfLine ? count - u : kOfLine;
    float* to = panel;
    for (int64_t e = 0; e < line; e += kOfDword, to += kOfDword * kRun) {
      const Vector factor = Float32::load(scales[(u + e) / kBlock]);
      Vector v[kOfDword];
      decoder.values_of_dwords(Float32::load(turned + e / kOfDword * kLanes), v);
      if (line - e >= kOfDword) {
#pragma GCC unroll 8
        for (int i = 0; i < kOfDword; ++i) store_values(to + i * kRun, v[i] * factor);
      } else {
        for (int i = 0; i < line - e; ++i) store_values(to + i * kRun, v[i] * factor);
      }
    }
  }
}

// Likewise of a matrix of units (rows, stride), whose rows may be read past their ends.
template <class Product>
inline void fill_turned_matrix(const float* matrix, int64_t stride, int64_t first, int64_t count, float* panel) {
  constexpr int64_t kRun = ColumnLayout<Product>::kRun;
  for (int64_t u = 0; u < count; u += kLanes) {
    turn_rows([&](int i) __attribute__((always_inline)) { return Float32::load(matrix + i * stride + first + u); },
              [&](int i, Vector column) __attribute__((always_inline)) {
                if (u + i < count) store_values(panel + (u + i) * kRun, column);
              });
  }
}

// Of a row, and of a token that meets it.
template <class Product>
constexpr int64_t turned_units(int64_t in_features) {
  return round_up(units_of<Product>(in_features), kUnitMultiple<Product>);
}

template <class Product>
constexpr int64_t turned_scratch_floats(int64_t tokens, int64_t rows, int64_t in_features) {
  return turned_most<Product>(rows, turned_units<Product>(in_features)).scratch_floats(tokens);
}

template <class Product, Codes codes>
void turned(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& l, const TokenUnits& input, int64_t tokens,
            const LowRank* low_rank, const LinearOutput& output, void* scratch) {
  using L = ColumnLayout<Product>;
  const Decoder<Product, codes> decoder(l);
  const int64_t all = turned_units<Product>(l.in_features);
  [[maybe_unused]] const typename Layout<Product>::Scope scope{};
  const ColumnShape shape = turned_shape<Product>(row_end - row_begin, all);
  for (int64_t n0 = row_begin; n0 < row_end; n0 += shape.columns) {
    const int64_t columns = shape.columns < row_end - n0 ? shape.columns : row_end - n0;
    ColumnSums<Product> sums(shape, tokens, columns, output.from(0, n0), scratch);
    // fill(column, panel) for kLanes columns each, of `count`
    const auto by_columns = [&](float* panel, int64_t count, const auto& fill) {
      for (int64_t c = 0; c < count; c += kLanes)
        fill(c, panel + c / L::kRun * L::kRun * shape.padded_units() + c % L::kRun);
    };
    sums.add(input, all, !low_rank, [&](int64_t first, int64_t count, float* panel) {
      by_columns(panel, round_up(columns, L::kRun), [&](int64_t c, float* run) {
        fill_turned<Product, codes>(decoder, packed + (n0 + c) * l.row_bytes, columns - c, l, first, count, run);
      });
    });
    if (!low_rank) continue;
    const float* weight = static_cast<const float*>(low_rank->weight) + n0 * low_rank->stride;
    sums.add({low_rank->input, low_rank->as_it_lies}, low_rank->stride, true, [&](int64_t first, int64_t count, float* panel) {
      by_columns(panel, columns, [&](int64_t c, float* run) {  // further ones are zeros already
        fill_turned_matrix<Product>(weight + c * low_rank->stride, low_rank->stride, first, count, run);
      });
    });
  }
}

}  // namespace
}  // namespace halfbyte::cpu
