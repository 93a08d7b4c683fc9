// linear and int8_linear of one kernel table on raw buffers, for test_amx_kernels.py: compiled twice, with the tiles emulated
// (HALFBYTE_EMULATE_AMX) and without any.
#include "cpu/simd/avx512.h"

#include "cpu/linear_bfloat16_avx512.h"

#include "cpu/int8_vectors_avx512.h"

#include "cpu/int8_linear_vnni.h"

#if defined(HALFBYTE_EMULATE_AMX)
#include "cpu/linear_amx.h"
#endif

namespace halfbyte::cpu {
namespace {
using Products = ProductList<BFloat16Pairs, Float32>;
using DirectProducts = Products;
}  // namespace
}  // namespace halfbyte::cpu

#include "cpu/int8_linear_kernel.h"
#include "cpu/linear_table.h"

using namespace halfbyte;
using namespace halfbyte::cpu;

namespace {
constexpr LinearKernels table = linear_kernels();
constexpr Int8LinearKernels int8 = int8_linear_kernels();
alignas(64) char scratch[4 << 20];
constexpr Compute kPairs = Compute::kBFloat16;
}  // namespace

extern "C" {

// x (tokens, K) bf16 times packed (rows, row_bytes) plus low_input (tokens, rank) times low_weight (rows, rank) where rank is
// not 0 -> out (tokens, rows) bf16, computed in two parts [0, split) and [split, rows). low_units: rows + kMostTileRows.
void forward(const uint8_t* packed, int64_t rows, int64_t split, int32_t format, int64_t block_size, int64_t K, const void* x,
             int64_t tokens, void* units, const void* low_input, const void* low_weight, int64_t rank, void* low_units,
             void* low_tiles, void* out) {
  const RowLayout l = row_layout(format, block_size, K);
  const int64_t tiles = (tokens + table.tile_tokens - 1) / table.tile_tokens;
  table.prepare_tiled(x, DType::kBFloat16, tokens, l, kPairs, 0, tiles, units);
  LowRank low{low_units, low_tiles, false, rank, round_up((rank + 1) / 2, table.lanes)};
  if (rank != 0) {
    table.prepare_low_rank(low_weight, DType::kBFloat16, rows, rank, 1.0f, kPairs, 0, low.stride, low_units);
    table.prepare_low_rank_tiled(low_input, DType::kBFloat16, tokens, rank, 1.0f, kPairs, low_tiles);
  }
  const LinearOutput to{out, nullptr, rows, DType::kBFloat16};
  table.tiled(packed, 0, split, l, kPairs, units, tokens, rank ? &low : nullptr, to, scratch);
  table.tiled(packed, split, rows, l, kPairs, units, tokens, rank ? &low : nullptr, to, scratch);
}

// Likewise on turned weights, plus bias (rows,) if there is one. as_it_lies: x's units are x, of tokens rounded up to 16; low_tiles: so
// many rows. Whether the scratch that it asks for is within the limit.
bool turned(const uint8_t* packed, int64_t rows, int64_t split, int32_t format, int64_t block_size, int64_t K, const void* x,
            int64_t tokens, void* units, bool as_it_lies, const void* low_input, const void* low_weight, int64_t rank, void* low_units,
            void* low_tiles, const void* bias, void* out) {
  const RowLayout l = row_layout(format, block_size, K);
  if (table.turned_scratch(kPairs, tokens, rows, K) > int64_t(sizeof scratch)) return false;
  if (!as_it_lies) table.prepare_matrix(x, DType::kBFloat16, tokens, K, kPairs, 0, tokens, units);
  LowRank low{low_units, low_tiles, true, rank, round_up((rank + 1) / 2, table.in(kPairs).matrix_units)};
  if (rank != 0) {
    table.prepare_low_rank(low_weight, DType::kBFloat16, rows, rank, 1.0f, kPairs, 0, low.stride, low_units);
    table.prepare_low_rank(low_input, DType::kBFloat16, tokens, rank, 1.0f, kPairs, 0, low.stride, low_tiles);
  }
  const LinearOutput to{out, bias, rows, DType::kBFloat16};
  const TokenUnits input{as_it_lies ? x : units, as_it_lies};
  table.turned(packed, 0, split, l, kPairs, input, tokens, rank ? &low : nullptr, to, scratch);
  table.turned(packed, split, rows, l, kPairs, input, tokens, rank ? &low : nullptr, to, scratch);
  return true;
}

// grad (tokens, rows) bf16 times packed -> out (tokens, K) bf16; its units are grad itself if as_it_lies, or prepared in two parts
// [0, split) and [split, tokens), split a multiple of 16.
void backward(const uint8_t* packed, int64_t rows, int32_t format, int64_t block_size, int64_t K, const void* grad, int64_t tokens,
              int64_t split, bool as_it_lies, void* units, void* out) {
  const RowLayout l = row_layout(format, block_size, K);
  const int64_t groups = (K + table.group - 1) / table.group;
  table.prepare_matrix(grad, DType::kBFloat16, tokens, rows, kPairs, 0, split, units);
  table.prepare_matrix(grad, DType::kBFloat16, tokens, rows, kPairs, split, tokens, units);
  table.backward(packed, rows, 0, groups, l, kPairs, {as_it_lies ? grad : units, as_it_lies}, tokens, nullptr,
                 LinearOutput{out, nullptr, K, DType::kBFloat16}, scratch);
}

// x (tokens, row_bytes) int8 rows, and 64 bytes more, times packed int8 rows -> out (tokens, rows) fp32.
void integer(const uint8_t* packed, int64_t rows, int64_t K, const uint8_t* x, int64_t tokens, void* units, float* factors, void* out) {
  const RowLayout l = row_layout(kInt8, 0, K);
  for (int64_t m = 0; m < tokens; m += table.lanes) int8.prepare_tiled(x + m * l.row_bytes, m, tokens, l, units, factors);
  int8.tiled(packed, 0, rows, l, units, factors, tokens, LinearOutput{out, nullptr, rows, DType::kFloat32}, scratch);
}
}
