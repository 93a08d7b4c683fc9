// linear: products of packed rows, decoded in registers or in a small panel, never as a dense weight. Included once per
// ISA, after linear_decode_<isa>.h.
//
// Every output is one fp32 sum over K (forward) or N (backward) in a fixed order, whatever the tiling and the threads.
// Legend: see linear_kernels.h; `codes` selects the decoder, `Product` the arithmetic.
#pragma once

#include "linear_pack.h"

namespace halfbyte::cpu {
namespace {

// body(const T*) for the element type.
template <class Body>
[[gnu::always_inline]] inline void with_elements(const void* data, DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32: return body(static_cast<const float*>(data));
    case DType::kBFloat16: return body(static_cast<const BFloat16*>(data));
    case DType::kFloat16: return body(static_cast<const Float16*>(data));
  }
}

// Two vectors of sums, rounded; where `Product` has an instruction that rounds its own sums, by that.
template <class Product, class T>
inline void store_sums_rounded(T* out, Vector low, Vector high) {
  if constexpr (requires { Product::store_rounded(out, low, high); }) Product::store_rounded(out, low, high);
  else store_rounded(out, low, high);
}

// Sums of two rows, rounded, in units of two, likewise.
template <class Product, class T, bool kBias>
inline Vector round_pairs(Vector even, Vector odd) {
  if constexpr (!kBias && __is_same(T, BFloat16) && requires { Product::round_pairs(even, odd); })
    return Product::round_pairs(even, odd);
  else
    return rounded_pairs<T>(even, odd);
}

template <class Product, class T, bool kBias>
inline void store_values_of_row(const float* sums, int64_t count, const T* bias, T* out) {
  const auto store = [&](int64_t i) { out[i] = from_float<T>(kBias ? sums[i] + to_float(bias[i]) : sums[i]); };
  int64_t i = 0;
  const auto sum = [&](int64_t at) { return kBias ? Float32::load(sums + at) + load_floats(bias + at) : Float32::load(sums + at); };
  const auto store_vectors = [&](T* to, Vector low, Vector high) {
    if constexpr (kBias) store_rounded(to, low, high);
    else store_sums_rounded<Product>(to, low, high);
  };
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) store_vectors(out + i, sum(i), sum(i + kLanes));
  if (i + kLanes <= count) {
    T twice[2 * kLanes];
    store_vectors(twice, sum(i), sum(i));
    memcpy(out + i, twice, kLanes * sizeof(T));
    i += kLanes;
  }
  for (; i + 4 <= count; i += 4)  // few tokens' panels have 12 rows: loops of a known length become vectors
    for (int j = 0; j < 4; ++j) store(i + j);
  for (; i < count; ++i) store(i);
}

// output[token, column : column + count] = sums[i] + bias, rounded once.
template <class Product>
inline void store_output(const LinearOutput& o, int64_t token, int64_t column, const float* sums, int64_t count) {
  const LinearOutput to = o.from(token, column);
  with_elements(to.bias, to.dtype, [&]<class T>(const T* bias) {
    if (bias) store_values_of_row<Product, T, true>(sums, count, bias, static_cast<T*>(to.data));
    else store_values_of_row<Product, T, false>(sums, count, nullptr, static_cast<T*>(to.data));
  });
}

// The last group of a row, where it is not a whole one: its codes, then zeros (a load past them could leave the tensor,
// and an fp8 code of NaN there would outlive the product with a padding zero).
template <Codes codes>
struct TailCodes {
  uint8_t bytes[kGroup];

  void load(const uint8_t* row, const RowLayout& l, int64_t group) {
    const int64_t at = four_bit(codes) ? group * kGroup / 2 : group * kGroup;
    memset(bytes, 0, sizeof bytes);
    memcpy(bytes, row + at, size_t(l.code_bytes - at));
  }
};

// The last group of R rows, where it is not whole, `group` groups behind the element `start`: its codes -> tails; returns where its scales
// are among `scales`.
template <int R, Codes codes, class Scales>
inline int64_t load_tails(const uint8_t* rows, const RowLayout& l, int64_t start, int64_t group, TailCodes<codes> tails[R],
                          Scales scales[R]) {
  const int64_t first = start + group * kGroup;
  for (int r = 0; r < R; ++r) tails[r].load(rows + r * l.row_bytes, l, first / kGroup);
  if constexpr (Scales::kInPlace) {
    const typename Scales::Places places(l, first, l.in_features - first);
    for (int r = 0; r < R; ++r) scales[r].load_tail(rows + r * l.row_bytes, l, places);
    return 0;
  }
  return group;
}

// The codes of a row's group, whole or its last one. What follows 4-bit codes in a row is as good as codes: there is no NaN among them.
template <Codes codes>
inline const uint8_t* codes_of_group(const uint8_t* row, const RowLayout& l, int64_t group, TailCodes<codes>& tail) {
  constexpr int64_t kBytes = four_bit(codes) ? kGroup / 2 : kGroup;
  const uint8_t* at = row + group * kBytes;
  if ((group + 1) * kGroup <= l.in_features || (four_bit(codes) && at + kBytes <= row + l.row_bytes)) return at;
  tail.load(row, l, group);
  return tail.bytes;
}

// ---- direct: dot products of decoded registers with M activations, R rows at a time --------------------------------

// One group of R rows, `stride` bytes apart, for M tokens.
template <int R, int M, class Product, Codes codes>
inline void direct_group(const Decoder<Product, codes>& decoder, const uint8_t* c, int64_t stride,
                         const typename Decoder<Product, codes>::DirectScales* s, int64_t group, const float* x, Vector sum[R][M]) {
  constexpr int kVectors = Product::kVectors;
  if constexpr (Product::kUnitElements == 1) {
    // One multiplication by the scales for each token's group is cheaper than one for each decoded vector.
    typename Product::Values v[kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      decoder.values(c + r * stride, v);
      const Vector factor = decoder.scale(s[r], group);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const float* p = x + m * kVectors * kLanes;
        Vector even = v[0] * Product::load(p), odd = v[1] * Product::load(p + kLanes);
#pragma GCC unroll 8
        for (int i = 2; i < kVectors; i += 2) {
          even = Product::multiply_add(v[i], Product::load(p + i * kLanes), even);
          odd = Product::multiply_add(v[i + 1], Product::load(p + (i + 1) * kLanes), odd);
        }
        sum[r][m] = Product::multiply_add(factor, even + odd, sum[r][m]);
      }
    }
  } else {
    constexpr int kShared = R * (M + kVectors) < 32 ? R : R > 2 ? 2 : 1;  // rows that share a load of x, as registers allow
#pragma GCC unroll 4
    for (int r0 = 0; r0 < R; r0 += kShared) {
      typename Product::Values v[kShared][kVectors];
#pragma GCC unroll 4
      for (int r = 0; r < kShared; ++r) decoder.scaled(c + (r0 + r) * stride, s[r0 + r], group, v[r]);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const auto units = Product::load(x + (m * kVectors + i) * kLanes);
#pragma GCC unroll 4
          for (int r = 0; r < kShared; ++r) sum[r0 + r][m] = Product::multiply_add(v[r][i], units, sum[r0 + r][m]);
        }
      }
    }
  }
}

template <class Product, int R, int M>
inline void direct_low_rank(const LowRank& low_rank, int64_t row, Vector sum[R][M]) {
  const float* w = static_cast<const float*>(low_rank.weight) + row * low_rank.stride;
  const float* x = static_cast<const float*>(low_rank.input);
  for (int64_t u = 0; u < low_rank.stride; u += kLanes)
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m)
        sum[r][m] = Product::multiply_add(Product::load(w + r * low_rank.stride + u), Product::load(x + m * low_rank.stride + u),
                                          sum[r][m]);
}

// What a pass over R rows, of `row_bytes` each, fetches meanwhile: the next rows, in the order in which they lie. The CPU sees one stream
// and runs ahead of it; row by row, at the places that are used next, each line would wait for memory in one of L1's few buffers. L1
// keeps them until their turn if it has room beside these rows and `shared` bytes that every pass reads. Else they go to L2, and from
// there to L1 shortly before they are used. Each step fetches `share` bytes, LINES lines.
template <int R, int LINES>
class NextRows {
 public:
  NextRows(const uint8_t* rows, int64_t row_bytes, int64_t share, int64_t shared)
      : next_(rows + R * row_bytes), row_bytes_(row_bytes), share_(share), to_l1_(2 * R * row_bytes + shared <= kL1Bytes) {}

  // `codes`: where the step is in the first row.
  [[gnu::always_inline]] void fetch(const uint8_t* codes) {
    constexpr int64_t kBytesAhead = 256;
    if (to_l1_) {
#pragma GCC unroll 9
      for (int line = 0; line < LINES; ++line) prefetch(next_ + 64 * line);
    } else {
#pragma GCC unroll 9
      for (int line = 0; line < LINES; ++line) prefetch_l2(next_ + 64 * line);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) prefetch(codes + r * row_bytes_ + kBytesAhead);
    }
    next_ += share_;
  }

 private:
  static constexpr int64_t kL1Bytes = 32 << 10;
  const uint8_t* next_;
  int64_t row_bytes_, share_;
  bool to_l1_;
};

constexpr int64_t kStoredRows = 16;  // whose outputs are rounded and stored together

// Sums of R rows and M tokens -> results (M, kStoredRows). `share`: bytes of R rows for each group of a row. `places`: of the first
// stretch.
template <class Product, Codes codes, int R, int M>
inline void direct_rows(const uint8_t* packed, int64_t row, const RowLayout& l, int64_t share, const Decoder<Product, codes>& decoder,
                        const typename Decoder<Product, codes>::DirectScales::Places& places, const float* x, const LowRank* low_rank,
                        float* results) {
  using D = Decoder<Product, codes>;
  using Scales = typename D::DirectScales;
  constexpr int kGroupUnits = direct_units<Product>(M);
  Vector sum[R][M];
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) sum[r][m] = zero_vector();
  const uint8_t* base = packed + row * l.row_bytes;
  NextRows<R, R * D::kCodeBytes / 64 + 1> next(base, l.row_bytes, share, M * l.in_features * 4 / Product::kUnitElements);
  for (int64_t start = 0; start < l.in_features; start += kStretch) {
    const int64_t count = start + kStretch < l.in_features ? kStretch : l.in_features - start;
    const int64_t groups = count / kGroup, first = start / kGroup;
    Scales scales[R];
    const typename Scales::Places of_stretch = start == 0 ? places : typename Scales::Places(l, start, count);
    for (int r = 0; r < R; ++r) scales[r].load(base + r * l.row_bytes, l, of_stretch);
    for (int64_t g = 0; g < groups; ++g) {
      const float* p = x + (first + g) * kGroupUnits;
      const uint8_t* c = base + (first + g) * D::kCodeBytes;
      next.fetch(c);
      direct_group<R, M>(decoder, c, l.row_bytes, scales, g, p, sum);
    }
    if (groups * kGroup < count) {
      TailCodes<codes> tails[R];
      const int64_t group = load_tails<R, codes>(base, l, start, groups, tails, scales);
      direct_group<R, M>(decoder, tails[0].bytes, sizeof(TailCodes<codes>), scales, group, x + (first + groups) * kGroupUnits, sum);
    }
  }
  if (low_rank) direct_low_rank<Product, R, M>(*low_rank, row, sum);
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) results[m * kStoredRows + r] = horizontal_sum(sum[r][m]);
}

template <class Product, Codes codes, int M>
void direct(const uint8_t* packed, int64_t row_begin, int64_t row_end, const RowLayout& l, const void* units,
            const LowRank* low_rank, const LinearOutput& output) {
  constexpr int R = kLanes < 16 ? 1 : 4;  // 16 registers hold one row's values and sums, 32 those of four
  const Decoder<Product, codes> decoder(l);
  const float* x = static_cast<const float*>(units);
  const int64_t share = R * l.row_bytes / ((l.in_features + kGroup - 1) / kGroup);
  const typename Decoder<Product, codes>::DirectScales::Places places(l, 0, l.in_features < kStretch ? l.in_features : kStretch);
  float results[M * kStoredRows];
  for (int64_t first = row_begin, end; first < row_end; first = end) {
    end = first + kStoredRows < row_end ? first + kStoredRows : row_end;
    int64_t row = first;
    for (; row + R <= end; row += R)
      direct_rows<Product, codes, R, M>(packed, row, l, share, decoder, places, x, low_rank, results + row - first);
    if constexpr (R > 1)
      for (; row < end; ++row)
        direct_rows<Product, codes, 1, M>(packed, row, l, share / R, decoder, places, x, low_rank, results + row - first);
    for (int m = 0; m < M; ++m) store_output<Product>(output, m, first, results + m * kStoredRows, end - first);
  }
}

// ---- micro-kernel: sums (R, G vectors) += a (R, units), broadcast, times b (units, G vectors) ------------------------

constexpr int64_t kPrefetchUnits = 6;
constexpr int64_t kSumsAhead = 32;  // so many units before the end the next rows' sums are fetched from L2; earlier, b would replace them

// What the next panel will read of the packed rows (backward: of the gradients), fetched while the micro-kernel has nothing else to
// fetch. Asked for where it is decoded, a panel's few lines of each row come all at once, and decoding waits for most of them.
struct Ahead {
  const uint8_t* line;  // any byte of the first row's first line; null: nothing
  int64_t stride;       // bytes from row to row
  int64_t units;        // of the micro-kernel that pass for every line of a row

  Ahead rows(int64_t count) const { return {line ? line + count * stride : nullptr, stride, units}; }
};

// The lines of an output that R rows by G vectors will be written to: they are often new memory, and a store that misses the caches would
// hold up those behind it.
template <int R, int G>
[[gnu::always_inline]] inline void fetch_output(const LinearOutput& output) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const char* run = static_cast<const char*>(output.from(r, 0).data);
    for (int64_t i = 0; i < G * kLanes * output.element_bytes(); i += 64) prefetch(run + i);
  }
}

// Complete sums from their registers, plus bias -> output, rounded.
template <class Product, int R, int G>
[[gnu::always_inline]] inline void store_tile(const typename Product::Sum sum[R][G], const LinearOutput& output) {
  with_elements(output.data, output.dtype, [&]<class T>(const T*) __attribute__((always_inline)) {
    T* const to = static_cast<T*>(output.data);
    if (const T* bias = static_cast<const T*>(output.bias)) {
#pragma GCC unroll 4
      for (int g = 0; g < G; g += 2) {
        const Vector low = load_floats(bias + g * kLanes), high = load_floats(bias + (g + 1) * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) store_rounded(to + r * output.stride + g * kLanes, sum[r][g] + low, sum[r][g + 1] + high);
      }
      return;
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int g = 0; g < G; g += 2) store_sums_rounded<Product>(to + r * output.stride + g * kLanes, sum[r][g], sum[r][g + 1]);
  });
}

// kStores: where `output` is given, the sums are complete and go there instead. Not inline: among a caller's variables GCC keeps addresses
// of rows in vector registers and moves them in every step. `ahead` by reference: a copy would load in vectors what has just been stored
// word by word, which waits until all stores before have left, and those of the last call are lines of the output.
template <class Product, int R, int G, bool kStores = false>
[[gnu::noinline]] void tile(const float* a, int64_t a_stride, const float* b, float* sums, int64_t sums_stride, int64_t units, bool first,
                            const Ahead& ahead, const LinearOutput* output = nullptr) {
  const uint8_t* line = ahead.line;
  if constexpr (kStores)
    if (output) fetch_output<R, G>(*output);
  typename Product::Sum sum[R][G];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) sum[r][g] = first ? typename Product::Sum{} : Product::load_sums(sums + r * sums_stride + g * kLanes);
  for (int64_t u = 0, stop; u < units; u = stop) {
    stop = units;
    if (line) {
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) prefetch(line + r * ahead.stride);
      line += 64;
      if (u + ahead.units < units) stop = u + ahead.units;
    } else if (u < units - kSumsAhead) {
      stop = units - kSumsAhead;
    }
    if (stop == units && !first) {
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) prefetch(sums + (R + r) * sums_stride + g * kLanes);
    }
    // Two at a time where nothing is fetched: fewer instructions, which counts where another thread shares the core.
#pragma GCC unroll(kFetchPanels ? 1 : 2)
    for (int64_t i = u; i < stop; ++i, b += G * kLanes) {
      typename Product::Values v[G];
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        v[g] = Product::load(b + g * kLanes);
        if (kFetchPanels) prefetch(b + (kPrefetchUnits * G + g) * kLanes);  // b streams from L2, a new page every 16 units
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const typename Product::Values w = Product::broadcast(a + r * a_stride + i);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sum[r][g] = Product::multiply_add(w, v[g], sum[r][g]);
      }
    }
  }
  if constexpr (kStores)
    if (output) return store_tile<Product, R, G>(sum, *output);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) Product::store_sums(sums + r * sums_stride + g * kLanes, sum[r][g]);
}

constexpr int64_t kRowsAhead = 16;  // rows of a backward panel whose codes are on their way

// Which elements a part of a panel has of each of its rows: groups [first, first + count), or to the end of a row.
template <class Product, Codes codes>
struct RowPart {
  int64_t first, whole, rest;  // whole groups; elements of a last one
  typename Decoder<Product, codes>::PanelScales::Places places, rest_places;

  RowPart(const RowLayout& l, int64_t first, int64_t count) : first(first) {
    const int64_t start = first * kGroup, length = start + count * kGroup < l.in_features ? count * kGroup : l.in_features - start;
    whole = length / kGroup;
    rest = length % kGroup;
    places = {l, start, length};
    rest_places = {l, start + whole * kGroup, rest};
  }
};

// A part of one row, decoded, in decode order, or kInOrder: vector i of its group g goes to place(g, i). A last group that is not whole is
// filled up with anything finite that its scale allows: the activations there are zero, or the columns are not stored. In decode order,
// where ends_in_half, it is half as long: the units of its first half, moved to the front; in order its second half is left out if nothing
// is there. `loaded`: the row's scale, where one holds for all of it. `next`: as many codes that are fetched meanwhile.
template <class Product, Codes codes, bool kInOrder = false, class Place>
[[gnu::always_inline]] inline void decode_row(const Decoder<Product, codes>& decoder, const uint8_t* row, const RowLayout& l,
                                              const RowPart<Product, codes>& part, const Place& place,
                                              const typename Decoder<Product, codes>::PanelScales* loaded = nullptr,
                                              const uint8_t* next = nullptr) {
  using D = Decoder<Product, codes>;
  constexpr int kVectors = Product::kVectors;
  typename D::PanelScales own;
  if (!loaded) own.load(row, l, part.places);
  const typename D::PanelScales& scales = loaded ? *loaded : own;
  typename Product::Values v[kVectors];
  const uint8_t* at = row + part.first * D::kCodeBytes;
  for (int64_t g = 0; g < part.whole; ++g, at += D::kCodeBytes) {
    if (next)
      for (int i = 0; i < D::kCodeBytes; i += 64) prefetch(next + g * D::kCodeBytes + i);
    decoder.template scaled<kInOrder>(at, scales, g, v);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) store_values(place(g, i), v[i]);
  }
  if (part.rest == 0) return;
  TailCodes<codes> tail;
  const uint8_t* const c = codes_of_group(row, l, part.first + part.whole, tail);
  // Blocks of at least half a group that are decoded in order ask for no scale that is not there.
  constexpr bool kCopied = !D::PanelScales::kWholeRow && !(kInOrder && codes == Codes::kFourBit);
  if constexpr (kCopied) own.load_tail(row, l, part.rest_places);
  const int64_t group = kCopied ? 0 : part.whole;
  const auto decode = [&]<int kCount>() __attribute__((always_inline)) {
    decoder.template scaled<kInOrder, kCount>(c, scales, group, v);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) store_values(place(part.whole, i), v[i]);
  };
  if constexpr (kInOrder) {
    if (2 * part.rest <= kGroup) decode.template operator()<kVectors / 2>();
    else decode.template operator()<kVectors>();
  } else if (!ends_in_half<Product, codes>(l)) {
    decode.template operator()<kVectors>();
  } else {
    decoder.scaled(c, scales, group, v);
    if constexpr (kFirstHalf<Product, codes> == FirstHalf::kLanes)
      for (int i = 0; i < kVectors / 2; ++i) v[i] = join_lower_halves(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors / 2; ++i) store_values(place(part.whole, i), v[i]);
  }
}

}  // namespace
}  // namespace halfbyte::cpu
