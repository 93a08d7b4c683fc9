// linear's backward: gradients broadcast, or in AMX's tiles, times the columns of a decoded panel. Included once per ISA.
#pragma once

#include "linear_tiled.h"

namespace halfbyte::cpu {
namespace {

// A panel of decoded weights, columns x units of N, in L2; beside it are the gradients that meet it and the sums.
struct BackwardShape {
  int64_t columns, units;
  constexpr int64_t padded_units() const { return units | 1; }  // odd, or a row's columns would share an L1 set
  constexpr int64_t panel_floats() const { return padded_units() * columns; }
  constexpr int64_t sums_stride() const { return columns + 16; }
  constexpr int64_t scratch_floats(int64_t tokens) const { return panel_floats() + round_up(tokens, 16) * sums_stride(); }
};

template <class Product>
inline void backward_vectors(int64_t tokens, const float* a, int64_t a_stride, const float* b, float* sums, int64_t sums_stride,
                             int64_t units, bool first, Ahead next) {
  constexpr int G = kTileVectors;
  for (; tokens >= 6; tokens -= 6, a += 6 * a_stride, sums += 6 * sums_stride, next = next.rows(6))
    tile<Product, 6, G>(a, a_stride, b, sums, sums_stride, units, first, next);
  switch (tokens) {
    case 5: tile<Product, 5, G>(a, a_stride, b, sums, sums_stride, units, first, next); break;
    case 4: tile<Product, 4, G>(a, a_stride, b, sums, sums_stride, units, first, next); break;
    case 3: tile<Product, 3, G>(a, a_stride, b, sums, sums_stride, units, first, next); break;
    case 2: tile<Product, 2, G>(a, a_stride, b, sums, sums_stride, units, first, next); break;
    case 1: tile<Product, 1, G>(a, a_stride, b, sums, sums_stride, units, first, next); break;
    default: break;
  }
}

// How gradients (tokens, units of N) meet a panel, which is stored by runs of kRun columns, unit after unit: broadcast, token after token.
template <class Product>
struct BackwardLayout {
  struct Gradients {
    const float* data;
    int64_t stride;
    Ahead next;  // those that are next, which come from L3
  };
  // Every panel loads and stores all sums, one of many units the least often, and every pass over the rows finds their scales and reads
  // the gradients anew; K = 576 takes one of pairs. (Of floats, twice as much, 256 columns fill L2.) With few tokens reading the weight
  // counts, and 256 columns of a row are 2 cache lines in a page of their own.
  static constexpr BackwardShape kMany{Product::kUnitElements == 2 ? 640 : 256, 512}, kFew{1024, 128};
  static constexpr int64_t kRun = kTileVectors * kLanes;  // columns of one micro-kernel
  static constexpr int64_t kTokensTogether = 1;
  // Tokens that meet all columns of a panel before the next ones do, a multiple of the micro-kernel's. AVX2: L2 keeps their gradients,
  // the next ones are fetched meanwhile, and sums that are complete are stored while they are in L1, to lines that were fetched
  // (csrc/README.md). AVX-512 gained nothing, and takes all at once.
  static constexpr int64_t kStripTokens = kLanes < 16 ? 24 : kLinearTokens;
  // Whether prepared gradients lie as in their matrix. Else each panel's units of all tokens lie together: passed over once for every
  // run of columns, rows that are a power of two apart would share sets of L2.
  static constexpr bool kPlain = kStripTokens < kLinearTokens;

  // Units of a token that lie together from `unit` on, the first of a panel, and where they are in prepared gradients.
  static int64_t run_units(const BackwardShape& shape, int64_t all_units, int64_t unit) {
    return kPlain ? all_units : shape.units < all_units - unit ? shape.units : all_units - unit;
  }
  static int64_t unit_at(const BackwardShape& shape, int64_t tokens, int64_t all_units, int64_t m, int64_t unit) {
    return kPlain ? m * all_units + unit : unit * tokens + m * run_units(shape, all_units, unit);
  }

  // What meets the panel of units from `unit` on: tokens from m0 on. After them the next strip does, or the first one the next panel.
  static Gradients gradients(const BackwardShape& shape, const float* prepared, int64_t tokens, int64_t all_units, int64_t m0,
                             int64_t unit) {
    const auto at = [&](int64_t m, int64_t u) { return prepared + unit_at(shape, tokens, all_units, m, u); };
    const bool last = tokens - m0 <= kStripTokens;
    const int64_t next = last ? unit + shape.units : unit;
    Ahead ahead{};
    if (next < all_units) {
      const auto* line = reinterpret_cast<const uint8_t*>(at(last ? 0 : m0 + kStripTokens, next));
      ahead = {line, 4 * run_units(shape, all_units, next), 16};
    }
    return {at(m0, unit), run_units(shape, all_units, unit), ahead};
  }

  // Where the sum of token m and column c lies, those of kLanes columns together.
  static int64_t sum_at(const BackwardShape& shape, int64_t m, int64_t c) { return m * shape.sums_stride() + c; }

  // sums (tokens, columns) += a (tokens, count units) times a panel (count, columns). `target`: where they are stored next.
  static void multiply(const BackwardShape& shape, const Gradients& a, int64_t tokens, int64_t count, const float* panel,
                       int64_t columns, float* sums, bool first, const Target& target) {
    Ahead next = a.next;
    for (int64_t c = 0; c < columns; c += kRun, next = {}) {
      target.fetch(c, c + kRun, columns);
      backward_vectors<Product>(tokens, a.data, a.stride, panel + c * shape.padded_units(), sums + c, shape.sums_stride(), count, first,
                                next);
    }
  }
};

#if defined(HALFBYTE_TILES)
template <class Product>
  requires kOnTiles<Product>
struct BackwardLayout<Product> {
  static constexpr BackwardShape kMany{256, kTogether}, kFew{1024, 32};
  static constexpr int64_t kRun = kTileSide;
  static constexpr int64_t kTokensTogether = kTileSide;
  static constexpr int64_t kStripTokens = kLinearTokens;
  static constexpr bool kPlain = false;

  static int64_t run_units(const BackwardShape&, int64_t /*all_units*/, int64_t /*unit*/) { return kTileSide; }
  static int64_t unit_at(const BackwardShape&, int64_t tokens, int64_t all_units, int64_t m, int64_t unit) {
    return tile_at(all_units, strips_of(tokens), m / kTileSide, unit) + m % kTileSide * kTileSide;
  }

  static TileOperand gradients(const BackwardShape& shape, const float* prepared, int64_t tokens, int64_t all_units, int64_t m0,
                               int64_t unit) {
    const int64_t left = all_units - unit / kTogether * kTogether, together = kTogether < left ? kTogether : left;
    return whole_tiles(prepared + unit_at(shape, tokens, all_units, m0, unit), together * kTileSide);
  }

  static int64_t sum_at(const BackwardShape& shape, int64_t m, int64_t c) {
    return m / kTileSide * kTileSide * shape.columns + c / kTileSide * kTileUnits + m % kTileSide * kTileSide + c % kTileSide;
  }

  static void multiply(const BackwardShape& shape, const TileOperand& a, int64_t tokens, int64_t count, const float* panel,
                       int64_t columns, float* sums, bool first, const Target&) {
    const int64_t columns_of_tiles = columns / kTileSide;
    TileFetch fetch{a.data, 0};
    if (tokens > kFewTokens) {  // the next strips' gradients, which are in L3; after the last ones the next units'
      fetch.lines = (4 * kTileSide + columns_of_tiles - 1) / columns_of_tiles;
      fetch.run = a.at(2);
    }
    tile_product<false>(strips_of(tokens), columns_of_tiles, a, whole_tiles(panel, kTileSide * shape.padded_units()), sums,
                        shape.columns * kTileSide, count / kTileSide, first, fetch);
  }
};
#endif

template <class Product>
constexpr const BackwardShape& backward_shape(int64_t tokens) {
  return tokens <= kFewTokens ? BackwardLayout<Product>::kFew : BackwardLayout<Product>::kMany;
}

template <class Product>
constexpr int64_t units_of(int64_t elements) {
  return (elements + Product::kUnitElements - 1) / Product::kUnitElements;
}

// What `backward` takes of backward_shape: `groups` of columns in even passes, and no more units than `rows` and a low-rank part have.
template <class Product>
constexpr BackwardShape call_shape(int64_t tokens, int64_t rows, int64_t groups, int64_t rank) {
  BackwardShape shape = backward_shape<Product>(tokens);
  const int64_t most = shape.columns / kGroup, passes = (groups + most - 1) / most;
  shape.columns = (groups + passes - 1) / passes * kGroup;
  const int64_t units = round_up(units_of<Product>(rows > rank ? rows : rank), kUnitMultiple<Product>);
  if (units < shape.units) shape.units = units;
  return shape;
}

// (tokens, columns) -> prepared gradients of tokens [begin, end), zeros past the last column; `begin` is a multiple of kTokensTogether.
template <class Product, class T>
void pack_gradients(const T* matrix, int64_t tokens, int64_t columns, int64_t begin, int64_t end, void* units) {
  using L = BackwardLayout<Product>;
  using E = typename Product::Element;
  const BackwardShape& shape = backward_shape<Product>(tokens);
  const int64_t all = round_up(units_of<Product>(columns), kUnitMultiple<Product>);
  for (int64_t m = begin; m < end; ++m) {
    const T* row = matrix + m * columns;
    for (int64_t u = 0, run; u < all; u += run) {
      run = L::run_units(shape, all, u);
      E* out = reinterpret_cast<E*>(static_cast<float*>(units) + L::unit_at(shape, tokens, all, m, u));
      const int64_t first = u * Product::kUnitElements, room = run * Product::kUnitElements;
      const int64_t given = columns - first < room ? columns - first : room;
      for (int64_t i = 0; i < given; ++i) convert(out[i], row[first + i]);
      for (int64_t i = given; i < room; ++i) convert(out[i], 0.0f);
    }
  }
}

// Panel unit u and column c lie at run c / kRun, then u, then c % kRun. row(n, out) writes `groups` groups of row n in decode order; one
// row after the other, as they lie in memory: of two at once the CPU would not see what comes next.
template <class Product, class Row>
inline void fill_panel(int64_t rows, int64_t n0, int64_t units, int64_t groups, const BackwardShape& shape, float* panel,
                       const Row& row) {
  using Values = typename Product::Values;
  constexpr int kElements = Product::kUnitElements;
  constexpr int64_t kRun = BackwardLayout<Product>::kRun, kFloats = kGroup / kElements;
  static_assert(kGroup == 8 * kLanes);
  static_assert(kGroup % kRun == 0);
  alignas(64) float decoded[kElements][BackwardLayout<Product>::kFew.columns / kElements];
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
[[gnu::noinline]] void store_sums(const BackwardShape& shape, const float* sums, int64_t m0, int64_t tokens, int64_t g0, int64_t groups,
                                  bool half, int64_t in_features, const LinearOutput& output) {
  using L = BackwardLayout<Product>;
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
  using L = BackwardLayout<Product>;
  constexpr int kElements = Product::kUnitElements;
  constexpr int64_t kGroupUnits = kGroup / kElements;
  const Decoder<Product, codes> decoder(l);
  const BackwardShape shape = call_shape<Product>(tokens, rows, group_end - group_begin, low_rank ? low_rank->rank : 0);
  const int64_t column_groups = shape.columns / kGroup;
  [[maybe_unused]] const typename Layout<Product>::Scope scope{};
  float* panel = static_cast<float*>(scratch);
  float* sums = panel + shape.panel_floats();
  for (int64_t g0 = group_begin; g0 < group_end; g0 += column_groups) {
    const int64_t groups = g0 + column_groups < group_end ? column_groups : group_end - g0;
    const bool half = ends_in_half<Product, codes>(l) && (g0 + groups) * kGroup > l.in_features;  // the last of them
    const int64_t columns = groups * kGroup - (half ? kGroup / 2 : 0), left = l.in_features - g0 * kGroup;
    const int64_t stored = left < columns ? left : columns;
    bool first = true;
    // sums (+)= grads (tokens, reduced rows) @ rows (reduced, columns); `last`: they are complete then
    const auto accumulate = [&](int64_t reduced_rows, const void* grads, bool last, const auto& row) {
      const int64_t reduced = round_up(units_of<Product>(reduced_rows), kUnitMultiple<Product>);
      for (int64_t u0 = 0; u0 < reduced; u0 += shape.units, first = false) {
        const int64_t units = u0 + shape.units < reduced ? shape.units : reduced - u0;
        const bool complete = last && u0 + units == reduced;
        fill_panel<Product>(reduced_rows, u0 * kElements, units, groups, shape, panel, row);
        for (int64_t m = 0, strip; m < tokens; m += strip) {
          strip = L::kStripTokens < tokens - m ? L::kStripTokens : tokens - m;
          const auto a = L::gradients(shape, static_cast<const float*>(grads), tokens, reduced, m, u0);
          float* const of_strip = sums + (first && complete ? 0 : L::sum_at(shape, m, 0));  // the first ones' place, if that is all
          Target target{};
          if (complete && L::kStripTokens < kLinearTokens) target = target_of(output, m, strip, g0 * kGroup, stored);
          L::multiply(shape, a, strip, units, panel, columns, of_strip, first, target);
          if (complete) store_sums<Product, codes>(shape, of_strip, m, strip, g0, groups, half, l.in_features, output);
        }
      }
    };
    accumulate(rows, grad, !low_rank, [&](int64_t n, float* out) {
      const uint8_t* row = packed + n * l.row_bytes;
      const uint8_t* next = row + kRowsAhead * l.row_bytes + g0 * Decoder<Product, codes>::kCodeBytes;
      decode_row<Product, codes>(decoder, row, l, g0, groups, out, nullptr, next);
    });
    if (low_rank) {
      accumulate(low_rank->rank, low_rank->input, true, [&](int64_t n, float* out) {
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
