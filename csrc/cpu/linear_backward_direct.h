// linear's backward for few tokens, straight from packed rows: each row's decoded values, times the tokens' gradients of that row, are
// added to the sums of its columns. Included once per ISA.
//
// Sums of a group of columns stay in registers for kRowsTogether rows, which take turns there: of one row at a time, they would be
// loaded and stored as often as values are decoded. Threads share slices of rows, which memory gives as they lie, and within a slice
// columns. How many slices there are the driver decides from N alone: sums do not depend on the number of threads.
#pragma once

#include "linear_kernel.h"

namespace halfbyte::cpu {
namespace {

constexpr int kRowsTogether = 8;
constexpr int kGroupVectors = kGroup / kLanes;  // vectors of a group's sums

// The lines of runs of `bytes` bytes, `stride` apart, in the order in which they lie: the CPU sees one stream and runs ahead of it. To L2:
// L1 is full of the sums.
class FetchRuns {
 public:
  FetchRuns(const uint8_t* run, int64_t bytes, int64_t stride) : at_(run), end_(run + bytes), skip_(stride - bytes), bytes_(bytes) {}
  void lines(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      prefetch_l2(at_);
      at_ += 64;
      if (at_ >= end_) at_ = end_ + skip_, end_ = at_ + bytes_;
    }
  }

 private:
  const uint8_t *at_, *end_;
  int64_t skip_, bytes_;
};

// A group of the rows of one unit, `rows` of them, for the sums: of pairs the values, with zeros for a second row that is not there; of one
// row the values before scaling, which are a multiplication less where the factor takes the scale.
template <class Product, Codes codes>
[[gnu::always_inline]] inline void unit_values(const Decoder<Product, codes>& decoder, const uint8_t* c, int64_t stride, int rows,
                                               const typename Decoder<Product, codes>::Scales* s, int64_t group,
                                               typename Product::Values v[kGroupVectors]) {
  if constexpr (Product::kUnitElements == 1) {
    decoder.values(c, v);
  } else {
    typename Product::Values even[Product::kVectors], odd[Product::kVectors]{};
    decoder.scaled(c, s[0], group, even);
    if (rows > 1) decoder.scaled(c + stride, s[1], group, odd);
    interleave_in_lanes(even, odd, v);
  }
}

// sum (TOKENS, COUNT) from and to sums, tokens `stride` floats apart; `first`: they were nothing before.
template <int TOKENS, int COUNT>
[[gnu::always_inline]] inline void read_sums(const float* sums, int64_t stride, bool first, Vector (&sum)[TOKENS][COUNT]) {
#pragma GCC unroll 4
  for (int m = 0; m < TOKENS; ++m)
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) sum[m][i] = first ? zero_vector() : Float32::load(sums + m * stride + i * kLanes);
}
template <int TOKENS, int COUNT>
[[gnu::always_inline]] inline void write_sums(const Vector (&sum)[TOKENS][COUNT], float* sums, int64_t stride) {
#pragma GCC unroll 4
  for (int m = 0; m < TOKENS; ++m)
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) store_values(sums + m * stride + i * kLanes, sum[m][i]);
}

// sums (M, group), `sums_stride` apart, += grads (units of R rows, M), broadcast, times a group of R rows, `stride` bytes apart.
template <int R, int M, class Product, Codes codes>
[[gnu::always_inline]] inline void add_group(const Decoder<Product, codes>& decoder, const uint8_t* c, int64_t stride,
                                             const typename Decoder<Product, codes>::Scales* s, int64_t group, const float* grads,
                                             float* sums, int64_t sums_stride, bool first) {
  using Values = typename Product::Values;
  constexpr int kElements = Product::kUnitElements;
  // Vectors of M sums each that registers hold beside what decoding needs; without SIMD decoding twice would cost more.
  constexpr bool kHalves = kLanes == 8 || (kLanes == 16 && M > kElements + 1);
  constexpr int kTogether = kHalves ? kGroupVectors / 2 : kGroupVectors;
  // AVX2's 16 registers hold no sums of 4 tokens beside it: 2 tokens at a time then, from the rows' values in L1.
  constexpr int kTokens = kLanes == 8 && M == 4 ? 2 : M;
#pragma GCC unroll 2
  for (int first_vector = 0; first_vector < kGroupVectors; first_vector += kTogether, sums += kTogether * kLanes) {
    const auto values = [&](int r, Values v[kGroupVectors]) __attribute__((always_inline)) {
      unit_values<Product, codes>(decoder, c + r * stride, stride, R - r, s + r, group, v);
    };
    if constexpr (kTokens < M) {
      static_assert(kElements == 1, "a pair's scales are in its values, and R may be odd");
      Values waiting[R][kTogether];
      for (int r = 0; r < R; ++r) {
        Values v[kGroupVectors];
        values(r, v);
#pragma GCC unroll 8
        for (int i = 0; i < kTogether; ++i) waiting[r][i] = v[first_vector + i];
      }
      for (int first_token = 0; first_token < M; first_token += kTokens) {
        Vector sum[kTokens][kTogether];
        read_sums(sums + first_token * sums_stride, sums_stride, first, sum);
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
          for (int m = 0; m < kTokens; ++m) {
            const Values factor = Product::broadcast(grads + r * M + first_token + m) * decoder.scale(s[r], group);
#pragma GCC unroll 8
            for (int i = 0; i < kTogether; ++i) sum[m][i] = Product::multiply_add(waiting[r][i], factor, sum[m][i]);
          }
        write_sums(sum, sums + first_token * sums_stride, sums_stride);
      }
    } else {
      Vector sum[M][kTogether];
      read_sums(sums, sums_stride, first, sum);
#pragma GCC unroll 8
      for (int r = 0; r < R; r += kElements) {
        Values v[kGroupVectors];
        values(r, v);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          auto factor = Product::broadcast(grads + r / kElements * M + m);
          if constexpr (kElements == 1) factor = factor * decoder.scale(s[r], group);
#pragma GCC unroll 8
          for (int i = 0; i < kTogether; ++i) sum[m][i] = Product::multiply_add(v[first_vector + i], factor, sum[m][i]);
        }
      }
      write_sums(sum, sums, sums_stride);
    }
  }
}

// sums (M, K) of groups [begin, end) += grads times R rows; `first`: they were nothing before. For each group `share` lines of the next R
// rows are fetched, `run` bytes of each. Not inline: it needs all registers.
template <int R, int M, class Product, Codes codes>
[[gnu::noinline]] void add_rows(const Decoder<Product, codes>& decoder, const uint8_t* row, const RowLayout& l, int64_t begin, int64_t end,
                                const float* grads, float* sums, int64_t sums_stride, bool first, int64_t run, int64_t share) {
  using D = Decoder<Product, codes>;
  FetchRuns next(row + R * l.row_bytes + begin * D::kCodeBytes, run, l.row_bytes);
  constexpr int64_t kStretchGroups = kStretch / kGroup;
  for (int64_t g0 = begin; g0 < end; g0 += kStretchGroups) {
    const int64_t last = g0 + kStretchGroups < end ? g0 + kStretchGroups : end, start = g0 * kGroup;
    const int64_t count = last * kGroup < l.in_features ? (last - g0) * kGroup : l.in_features - start, groups = count / kGroup;
    typename D::Scales scales[R];
    const typename D::Scales::Places places(l, start, count);
    for (int r = 0; r < R; ++r) scales[r].load(row + r * l.row_bytes, l, places);
    TailCodes<codes> tails[R];
    const uint8_t* c = row + g0 * D::kCodeBytes;
    int64_t stride = l.row_bytes;
    for (int64_t g = 0, of_scales = 0; g < last - g0; ++g, ++of_scales, c += D::kCodeBytes) {
      if (g == groups) {  // the last one, where it is not whole
        of_scales = load_tails<R, codes>(row, l, start, g, tails, scales);
        c = tails[0].bytes;
        stride = sizeof(TailCodes<codes>);
      }
      next.lines(share);
      add_group<R, M, Product, codes>(decoder, c, stride, scales, of_scales, grads, sums + start + g * kGroup, sums_stride, first);
    }
  }
}

// grad (M, rows) from `row` on, of `dtype`, rows grad_stride elements apart -> units (R rows, M), zeros where R is odd.
template <int R, int M, class Product>
inline void load_grads(const void* grad, DType dtype, int64_t grad_stride, int64_t row,
                       float units[(R + Product::kUnitElements - 1) / Product::kUnitElements * M]) {
  constexpr int kElements = Product::kUnitElements;
  auto* const out = reinterpret_cast<typename Product::Element*>(units);
  with_elements(grad, dtype, [&]<class T>(const T* g) {
    for (int r = 0; r < round_up(R, kElements); ++r)
      for (int m = 0; m < M; ++m) {
        auto& to = out[(r / kElements * M + m) * kElements + r % kElements];
        if (r < R) convert(to, g[m * grad_stride + row + r]);
        else convert(to, 0.0f);
      }
  });
}

template <int M, class Product, Codes codes>
void backward_direct(const uint8_t* packed, int64_t rows, int64_t group_begin, int64_t group_end, const RowLayout& l, const void* grad,
                     DType dtype, int64_t grad_stride, float* sums, int64_t sums_stride) {
  using D = Decoder<Product, codes>;
  const D decoder(l);
  const int64_t groups = group_end - group_begin;
  const bool whole_rows = group_begin == 0 && group_end * kGroup >= l.in_features;  // scales are fetched with them
  const int64_t run = whole_rows ? l.row_bytes : groups * D::kCodeBytes;
  int64_t n = 0;
  const auto add = [&]<int R>() {
    const int64_t share = (R * ((run + 63) / 64) + groups - 1) / groups;
    for (; n + R <= rows; n += R) {
      alignas(4) float grads[(R + Product::kUnitElements - 1) / Product::kUnitElements * M];
      load_grads<R, M, Product>(grad, dtype, grad_stride, n, grads);
      const uint8_t* row = packed + n * l.row_bytes;
      add_rows<R, M, Product, codes>(decoder, row, l, group_begin, group_end, grads, sums, sums_stride, n == 0, run, share);
    }
  };
  add.template operator()<kRowsTogether>();
  add.template operator()<1>();
}

// Where the sums of a group's elements are among its units, as unit_values leaves them.
template <class Product, Codes codes>
struct SumPlaces {
  uint8_t of[kGroup];
  constexpr SumPlaces() : of() {
    for (int i = 0; i < kGroup; ++i) {
      int position = i;
      if constexpr (Product::kUnitElements == 2) position = Product::interleaved_at(i);
      of[element_at<Product, codes>(position)] = uint8_t(i);
    }
  }
};

template <class Product, Codes codes>
void finish_backward(const float* sums, int64_t slices, int64_t tokens, int64_t sums_stride, int64_t group_begin, int64_t group_end,
                     const RowLayout& l, const LowRank* low_rank, const LinearOutput& output) {
  static constexpr SumPlaces<Product, codes> places;
  const auto each = [](const auto& body) {
    for (int i = 0; i < kGroupVectors; ++i) body(i);
  };
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t g = group_begin; g < group_end; ++g) {
      Vector sum[kGroupVectors];
      each([&](int i) { sum[i] = zero_vector(); });
      for (int64_t s = 0; s < slices; ++s) {
        const float* of_slice = sums + (s * tokens + m) * sums_stride + g * kGroup;
        each([&](int i) { sum[i] = sum[i] + Float32::load(of_slice + i * kLanes); });
      }
      float decoded[kGroup], ordered[kGroup];
      each([&](int i) { store_values(decoded + i * kLanes, sum[i]); });
      for (int e = 0; e < kGroup; ++e) ordered[e] = decoded[places.of[e]];
      if (low_rank) {
        const float* weight = static_cast<const float*>(low_rank->weight) + g * kGroup;
        const float* input = static_cast<const float*>(low_rank->input) + m * low_rank->rank;
        each([&](int i) { sum[i] = Float32::load(ordered + i * kLanes); });
        for (int64_t r = 0; r < low_rank->rank; ++r, weight += low_rank->stride) {
          const Vector factor = Float32::broadcast(input + r);
          each([&](int i) { sum[i] = Float32::multiply_add(Float32::load(weight + i * kLanes), factor, sum[i]); });
        }
        each([&](int i) { store_values(ordered + i * kLanes, sum[i]); });
      }
      const int64_t left = l.in_features - g * kGroup;
      store_output<Float32>(output, m, g * kGroup, ordered, left < kGroup ? left : kGroup);
    }
  }
}

}  // namespace
}  // namespace halfbyte::cpu
