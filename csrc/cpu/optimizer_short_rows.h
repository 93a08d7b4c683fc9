// Rows that 4 vectors hold several of, one block each: what differs between rows of whole vectors and rows that are parts of one.
// Included once per ISA, after optimizer_codec.h.
#pragma once

#include "optimizer_codec.h"

namespace halfbyte::cpu::optimizer {
namespace {

// 4 vectors that are rows of V vectors each.
template <int V>
struct VectorRows {
  explicit VectorRows(int64_t) {}
  static constexpr int length() { return V * kWidth; }
  // values[row] in all lanes, for vector j.
  static Floats spread(const float* values, int j) { return splat(values[j / V]); }

  // Scales of the rows whose vectors have these largest |moments| by lane, and what the moments are multiplied with.
  struct Scales {
    float of_row[4 / V];
    FactorPerVector factor;
    bool plain = true;  // is_plain of all
    [[gnu::always_inline]] void find(const VectorRows&, const Ints (&most)[4]) {
      for (int r = 0; r < 4 / V; ++r) {
        const uint32_t absmax = largest(V == 1 ? most[r] : maximum_unsigned(most[V * r], most[V * r + 1]));
        plain &= is_plain(absmax);
        of_row[r] = bits_float(absmax);
        for (int j = V * r; j < V * (r + 1); ++j) factor.value[j] = 1.0f / of_row[r];
      }
    }
    void store_to(float* scales) const { memcpy(scales, of_row, sizeof of_row); }
  };
};

// 4 vectors that are shorter rows, of a power of two: a vector holds several.
class LaneRows {
 public:
  explicit LaneRows(int64_t length) : length_(int(length)) {}
  int length() const { return length_; }
  Floats spread(const float* values, int j) const { return load_row_values(values + j * kWidth / length_, length_); }

  struct Scales {
    alignas(64) float of_lane[kGroup];
    FactorPerLane factor;
    bool plain = true;
    int length;
    [[gnu::always_inline]] void find(const LaneRows& rows, const Ints (&most)[4]) {
      length = rows.length_;
      Ints worst = splat_bits(0);
      for (int j = 0; j < 4; ++j) {
        const Ints absmax = largest_of_rows(most[j], length);
        worst = maximum_unsigned(worst, add_ints(absmax, splat_bits(0xFFFFFFFFu)));
        store(of_lane + j * kWidth, from_bits(absmax));
        factor.value[j] = divide(splat(1.0f), from_bits(absmax));
      }
      plain = is_plain(largest(worst) + 1u);
    }
    void store_to(float* scales) const {
      for (int i = 0; i < kGroup; i += length) *scales++ = of_lane[i];
    }
  };

 private:
  int length_;
};

}  // namespace
}  // namespace halfbyte::cpu::optimizer
