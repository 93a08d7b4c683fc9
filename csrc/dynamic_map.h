// The 8-bit dynamic map of optimizer state in closed form: no kernel needs a 256-entry table (docs/formats.md).
//
// A moment is coded per block of 256 elements of a row (a parameter's dimension 0; a 1-D parameter is one row) as
// value = scale * map(code), scale = the block's absmax. With a magnitude m and e = floor(log2 m),
//     map = fma(4 m, B[e], A[e]) in fp32,  4 B[e] = 0.9 p / 2^e,  A[e] = p (0.45 / 2^e - 0.8),  p = 10^(e-6) or 10^(e-7)
//   signed (first moments):    m = |code - 127|, p = 10^(e-6); m = 0 is 0; code 255 is 1.0; code 0 is -0.99297
//   unsigned (second moments): m = code + 1,     p = 10^(e-7); code 0 is 0; code 255 is 1.0
// These are bitsandbytes' codes; values agree with its table within 8 ulp (Dettmers et al. 2022, arXiv:2110.02861).
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define HALFBYTE_MAP_HD __host__ __device__
#else
#define HALFBYTE_MAP_HD
#endif

namespace halfbyte {

inline constexpr int64_t kStateBlock = 256;  // elements of a row that share one scale

// Everything that decodes and encodes one of the two maps.
//
// Classes of the encoder: class c holds the magnitudes of one decade, 2^e <= m < 2^(e+1) with e = c (signed) or c + 1
// (unsigned), where class 0 of the signed map also holds m = 0 and class 7 is the single value 1.0. Inside a class
// w = a * J[c] + 8/9 lies in [1, 2) and m = trunc(w * 2^e) is the nearest entry, except within a few ulps of a midpoint:
// there the caller must ask `midpoint` (w's distance to a step is the test, kTieUlps).
// Tables of 8 stand there twice: a vector of 16 floats holds them.
struct alignas(64) DynamicMap {
  float A[16], B[16];    // indexed by (e + 1) & 7: the low bits of the exponent field of float(4 m), and of float(0)
  float J[16];           // 1 / (0.9 p) by class
  float P[16];           // 2^c by class
  float above[16];       // a > above[c] means class c + 1: exact boundary of the classes
  float midpoint[257];   // a > midpoint[m] means nearer to m + 1 than to m: largest fp32 not above the exact midpoint
  float code_offset;     // min(w, kInsideLastStep) * P[c] + code_offset = 128 + m (signed) or 128 + (m - 1) / 2 (unsigned) and kTieUlps
  int32_t guess_offset;  // class guess: ((bits(a) >> 16) - guess_offset, not below 0) * 153 >> 16 is the class or one less
  int32_t first_exponent;  // e of class 0
  int32_t last;          // m of the value 1.0: 128 or 256
};

// Ulps of 2^-16 by which fma(min(w, kInsideLastStep), P[c], code_offset) is shifted up: below twice that, behind the upper 16
// bits, lies what needs `midpoint`. Tried with every float: 0 is too small.
inline constexpr uint32_t kTieUlps = 1;
// Above w = 2 lies the gap below the next class, which belongs to this class's last entry: inside of its step, not near the end.
inline constexpr float kInsideLastStep = 2.0f - 0x1p-8f;

namespace dynamic_map_detail {

constexpr double pow10(int e) {
  double p = 1.0;
  for (int i = 0; i < -e; ++i) p *= 10.0;  // exact up to 10^22
  return 1.0 / p;
}

// Magnitude m as fp32. 4 m * B + A is exact in fp64 (9 + 24 bits, aligned), so this is the fma.
constexpr float value_of(const DynamicMap& map, bool is_signed, int m) {
  if (m == map.last) return 1.0f;
  if (m == (is_signed ? 0 : 1)) return 0.0f;
  int e = 0;
  while ((2 << e) <= m) ++e;
  return float(4 * double(m) * double(map.B[(e + 1) & 7]) + double(map.A[(e + 1) & 7]));
}

constexpr DynamicMap make(bool is_signed) {
  DynamicMap map{};
  const int first = is_signed ? 0 : 1;
  map.first_exponent = first;
  map.last = is_signed ? 128 : 256;
  for (int e = first; e < first + 7; ++e) {
    const double p = pow10(e - 6 - first), scale = double(1 << e);
    map.B[(e + 1) & 7] = float(0.9 * p / scale) / 4;
    map.A[(e + 1) & 7] = float(p * (0.45 / scale - 0.8));
    map.J[e - first] = float(1.0 / (0.9 * p));
  }
  // The remaining slot decodes 0 and 1.0, which share it: m = 0 and m = 128 (signed), m = 1 and m = 256 (unsigned).
  map.B[is_signed ? 0 : 1] = (is_signed ? 1.0f / 128 : 1.0f / 255) / 4;
  map.A[is_signed ? 0 : 1] = is_signed ? 0.0f : -(1.0f / 255);
  for (int c = 0; c < 8; ++c) map.P[c] = float(1 << c);
  map.code_offset = (is_signed ? 128.0f : 127.5f) + float(kTieUlps) / 65536.0f;
  for (int m = first; m < map.last; ++m) {
    const double exact = 0.5 * (double(value_of(map, is_signed, m)) + double(value_of(map, is_signed, m + 1)));
    float mid = float(exact);
    if (double(mid) > exact) mid = float(double(mid) * (1.0 - 1.5 / 16777216.0));  // the predecessor
    map.midpoint[m] = mid;
  }
  // A positive second moment never becomes code 0: its smallest code is m = 2.
  if (!is_signed) map.midpoint[1] = 0.0f;
  for (int c = 0; c < 7; ++c) map.above[c] = map.midpoint[(2 << (c + first)) - 1];
  map.above[7] = 3e38f;
  // Class 0 of the signed map has one step, from 0 to m = 1: w = 1 at its midpoint.
  if (is_signed) map.J[0] = float((1.0 - 8.0 / 9.0) / double(map.midpoint[0]));
  // Class 7: a is about 1; w half a step above the class's start, far from any tie.
  map.J[7] = float(1.0 + 0.5 / double(map.last) - 8.0 / 9.0);
  for (int i = 0; i < 8; ++i) {
    map.A[i + 8] = map.A[i], map.B[i + 8] = map.B[i], map.above[i + 8] = map.above[i];
    map.J[i + 8] = map.J[i], map.P[i + 8] = map.P[i];
  }
  return map;
}

}  // namespace dynamic_map_detail

inline constexpr DynamicMap make_dynamic_map(bool is_signed) {
  DynamicMap map = dynamic_map_detail::make(is_signed);
  // One class is 10x, that is 3.32 binades or 425 steps of the upper 16 bits; 153 / 65536 = 1 / 428.
  map.guess_offset = (std::bit_cast<int32_t>(map.above[0]) >> 16) - 425;
  return map;
}

inline constexpr DynamicMap kSignedMap = make_dynamic_map(true);
inline constexpr DynamicMap kUnsignedMap = make_dynamic_map(false);

}  // namespace halfbyte
