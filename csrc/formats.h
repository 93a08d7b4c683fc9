// Format ids, codebooks and the arithmetic of a packed row: no torch, host and device (docs/formats.md has the rules).
//
//   row n:  | codes of row n | zeros to 4 | scales of row n | zeros to 16 |
//
// N = rows (out_features), K = elements of a row (in_features).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define HALFBYTE_HD __host__ __device__
#else
#define HALFBYTE_HD
#endif

namespace halfbyte {

// The ids cross the dispatcher as ints and are stored in files: never renumber.
enum FormatId : int32_t { kNF4 = 0, kFP4 = 1, kNF4DQ = 2, kFP4DQ = 3, kInt8 = 4, kFP8 = 5, kNumFormats = 6 };

// Element types that cross from the fronts to the kernels.
enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr const char* kFormatNames[kNumFormats] = {"nf4", "fp4", "nf4-dq", "fp4-dq", "int8", "fp8"};

HALFBYTE_HD constexpr bool is_4bit(int32_t format) { return format <= kFP4DQ; }
HALFBYTE_HD constexpr bool is_fp4(int32_t format) { return format == kFP4 || format == kFP4DQ; }
HALFBYTE_HD constexpr bool is_double_quantized(int32_t format) { return format == kNF4DQ || format == kFP4DQ; }

// NormalFloat, Dettmers et al. 2023 (arXiv:2305.14314), appendix E.
inline constexpr float kNF4Codebook[16] = {
    -1.0f,                 -0.6961928009986877f, -0.5250730514526367f,  -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f,  0.16093020141124725f, 0.24611230194568634f,  0.33791524171829224f,
    0.44070982933044434f,  0.5626170039176941f,  0.7229568362236023f,   1.0f};

// Twelfths, in code order; code 8 (-0) is never written. Same values as bitsandbytes' fp4.
inline constexpr float kFP4Codebook[16] = {
    0.0f,  0.0625f / 12,  8.0f / 12,  1.0f,  4.0f / 12,  6.0f / 12,  2.0f / 12,  3.0f / 12,
    -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -6.0f / 12, -2.0f / 12, -3.0f / 12};

// fp4 magnitude codes in ascending order of magnitude.
inline constexpr uint8_t kFP4Ascending[8] = {0, 1, 6, 7, 4, 5, 2, 3};

// Host only: device code gets the table as a kernel argument.
constexpr const float* codebook(int32_t format) { return is_fp4(format) ? kFP4Codebook : kNF4Codebook; }

// The code of 0.0: what padding elements and invalid blocks hold.
HALFBYTE_HD constexpr uint8_t zero_nibble(int32_t format) { return is_fp4(format) ? 0 : 7; }

// nf4 thresholds: fp32 midpoints of neighbouring values; the code is the number of thresholds strictly below v.
struct NF4Thresholds {
  float value[15];
};
constexpr NF4Thresholds make_nf4_thresholds() {
  NF4Thresholds t{};
  for (int i = 0; i < 15; ++i) t.value[i] = 0.5f * (kNF4Codebook[i] + kNF4Codebook[i + 1]);
  return t;
}
inline constexpr NF4Thresholds kNF4Thresholds = make_nf4_thresholds();

// fp4 thresholds: the largest fp32 not above the exact midpoint of neighbouring magnitudes, so that `a > t` means
// "nearer to the larger one" exactly and a tie goes to the smaller one.
struct FP4Thresholds {
  float value[7];
};
constexpr FP4Thresholds make_fp4_thresholds() {
  FP4Thresholds t{};
  for (int i = 0; i < 7; ++i) {
    const double exact =
        0.5 * (double(kFP4Codebook[kFP4Ascending[i]]) + double(kFP4Codebook[kFP4Ascending[i + 1]]));  // exact in fp64
    float mid = float(exact);
    // Where rounding went up, take the predecessor: m * 1.5 * 2^-24 is 0.75 to 1.5 ulp for a mantissa m in [1, 2).
    if (double(mid) > exact) mid = float(double(mid) * (1.0 - 1.5 / 16777216.0));
    t.value[i] = mid;
  }
  return t;
}
inline constexpr FP4Thresholds kFP4Thresholds = make_fp4_thresholds();

inline constexpr float kInt8Max = 127.0f;
inline constexpr float kFP8Max = 448.0f;  // largest finite e4m3fn
inline constexpr uint32_t kNaNBits = 0x7FC00000u;  // scale of a block that held NaN or Inf

// Everything the kernels need to know of one packed row.
struct RowLayout {
  int64_t in_features;    // K
  int64_t block_size;     // elements that share a scale; K for the row formats
  int64_t num_blocks;     // ceil(K / block_size)
  int64_t code_bytes;     // ceil(K * bits / 8)
  int64_t scales_offset;  // where the scales start; -dq: uint8 codes start at code_bytes, step and low at scales_offset
  int64_t row_bytes;      // multiple of 16
  int32_t format;
};

HALFBYTE_HD constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// block_size 0 means one scale per row. Arguments must have been checked (checks.h).
HALFBYTE_HD constexpr RowLayout row_layout(int32_t format, int64_t block_size, int64_t in_features) {
  RowLayout l{};
  l.format = format;
  l.in_features = in_features;
  l.block_size = block_size == 0 ? in_features : block_size;
  l.num_blocks = (in_features + l.block_size - 1) / l.block_size;
  l.code_bytes = is_4bit(format) ? (in_features + 1) / 2 : in_features;
  const bool dq = is_double_quantized(format);
  l.scales_offset = round_up(l.code_bytes + (dq ? l.num_blocks : 0), 4);
  l.row_bytes = round_up(l.scales_offset + (dq ? 8 : 4 * l.num_blocks), 16);
  return l;
}
static_assert(row_layout(kNF4, 64, 100).row_bytes == 64);
static_assert(row_layout(kInt8, 0, 4096).row_bytes == 4112);

}  // namespace halfbyte
