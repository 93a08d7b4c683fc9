// How vectors find 4-bit codes. x * reciprocal as a whole number of steps of 2^-15 is a word; its upper 5 bits, its place, choose a
// number that added to it leaves the code in the upper 4 bits. No place holds two thresholds. A word that a threshold rounds to may
// be on either side of it; the lower bits of the sum are 0 for such words alone, and the floats themselves decide (3 elements of
// 10,000 of a normal distribution, where the largest of 64 is 1).
#pragma once

#include "kernels.h"

namespace halfbyte::cpu {
namespace {

constexpr int kPlaces = 32;     // in two's complement: those from 0 up, then those below 0
constexpr int kPlaceBits = 11;  // of a word, below its place
constexpr int kCodeBits = 12;   // of a sum, below its code
// Steps from 0 to 1. Fewer than 2^15, so that 1 is a word; no threshold is near the middle between two words.
constexpr float kStepsPerUnit = 32624.0f;
// x * (reciprocal * kUnit) + kOrigin has the steps in its lower 16 bits: the last bit of a number of [256, 512) is worth 2^-15.
constexpr float kUnit = kStepsPerUnit / 32768.0f, kOrigin = 384.0f;

struct PlaceTable {
  alignas(64) uint16_t addend[kPlaces];
  bool valid;
};

// `thresholds` ascend; the code below all of them is `lowest`, each adds 1 to it (modulo 16).
constexpr PlaceTable make_place_table(const double* thresholds, int count, int lowest) {
  PlaceTable table{};
  table.valid = true;
  for (int place = 0; place < kPlaces; ++place) {
    const int first = (place < kPlaces / 2 ? place : place - kPlaces) << kPlaceBits, last = first + (1 << kPlaceBits) - 1;
    int below = 0, inside = 0, word = 0;
    for (int i = 0; i < count; ++i) {
      const double steps = thresholds[i] * double(kStepsPerUnit);
      const int nearest = int(steps < 0 ? steps - 0.5 : steps + 0.5);
      below += nearest < first;
      if (nearest < first || nearest > last) continue;
      ++inside;
      word = nearest;
      // What rounding does to products is less than 0.02 steps: only the nearest word may stand for both sides.
      const double off = steps - nearest;
      table.valid = table.valid && off < 0.4 && off > -0.4;
    }
    table.valid = table.valid && inside <= 1;
    const int code = (lowest + below) << kCodeBits;
    table.addend[place] = uint16_t(inside ? code + (1 << kCodeBits) - word : code + (1 << (kCodeBits - 1)) - (first + last) / 2);
  }
  return table;
}

constexpr PlaceTable make_nf4_places() {
  double thresholds[15]{};
  for (int i = 0; i < 15; ++i) thresholds[i] = double(kNF4Thresholds.value[i]);
  return make_place_table(thresholds, 15, 0);
}

// The ranks of magnitudes, and below 0 16 less them: 9 to 15, 0 to 7.
constexpr PlaceTable make_fp4_places() {
  double thresholds[14]{};
  for (int i = 0; i < 7; ++i) {
    thresholds[7 + i] = double(kFP4Thresholds.value[i]);
    thresholds[6 - i] = -thresholds[7 + i];
  }
  return make_place_table(thresholds, 14, 16 - 7);
}

inline constexpr PlaceTable kNF4Places = make_nf4_places(), kFP4Places = make_fp4_places();
static_assert(kNF4Places.valid && kFP4Places.valid);

struct FP4Codes {
  alignas(16) uint8_t of_rank[16];  // as in kFP4Places; that of 0 is 0
};
constexpr FP4Codes make_fp4_codes() {
  FP4Codes codes{};
  for (int i = 0; i < 8; ++i) {
    codes.of_rank[i] = kFP4Ascending[i];
    if (i) codes.of_rank[16 - i] = uint8_t(kFP4Ascending[i] | 8);
  }
  return codes;
}
inline constexpr FP4Codes kFP4Codes = make_fp4_codes();

// Codes of the elements of x[0..32) whose bits are set, by the floats themselves.
template <class T, bool FP4>
[[gnu::noinline]] void decide(const T* x, float reciprocal, uint32_t which, uint8_t* codes) {
  for (; which; which &= which - 1) {
    const int i = __builtin_ctz(which);
    const float v = to_float(x[i]) * reciprocal;
    const uint8_t code = FP4 ? encode_fp4(v) : encode_nf4(v);
    codes[i / 2] = i % 2 ? uint8_t((codes[i / 2] & 0xF0) | code) : uint8_t((codes[i / 2] & 0x0F) | code << 4);
  }
}

}  // namespace
}  // namespace halfbyte::cpu
