// C entry points of the emulated kernels, called by tests/cuda/emulated.py through ctypes.
#include "emulator.h"

#include "../../csrc/cuda/elements.h"
#include "../../csrc/cuda/geometry.h"
#include "../../csrc/cuda/kernels.h"

using namespace halfbyte;

#pragma GCC visibility push(default)
extern "C" {

void emulated_set_reversed(int reversed) { emulator::set_reversed(reversed != 0); }

int emulated_dequantize(const uint8_t* packed, int64_t rows, int format, int64_t block_size, int64_t in_features, int dtype,
                        void* output) {
  return cuda::launch_dequantize(packed, rows, row_layout(format, block_size, in_features), DType(dtype), output, nullptr);
}

int emulated_embedding(const void* indices, int wide, int64_t count, const uint8_t* packed, int64_t num_embeddings, int format,
                       int64_t block_size, int64_t dim, int dtype, void* output) {
  return cuda::launch_embedding(indices, wide != 0, count, packed, num_embeddings, row_layout(format, block_size, dim),
                                DType(dtype), output, nullptr);
}

int emulated_quantize(const void* input, int dtype, const float* scales, int64_t rows, int format, int64_t block_size,
                      int64_t in_features, uint8_t* packed) {
  return cuda::launch_quantize(input, DType(dtype), scales, rows, row_layout(format, block_size, in_features), packed, nullptr);
}

// The 4-bit code of each v by the bucket table, and by counting thresholds as the rules say. Returns the first index where
// they differ, or -1.
int64_t check_encode_4bit(const float* v, int64_t count, int fp4) {
  const cuda::EncodeTable table = cuda::make_encode_table(fp4 ? kFP4 : kNF4);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t expected = 0;
    if (fp4) {
      int rank = 0;
      for (float t : kFP4Thresholds.value) rank += (v[i] < 0 ? -v[i] : v[i]) > t;
      expected = kFP4Ascending[rank];
      if (v[i] < 0 && expected != 0) expected |= 8;
    } else {
      for (float t : kNF4Thresholds.value) expected += v[i] > t;
    }
    const uint32_t got = fp4 ? cuda::encode_4bit<true>(table.bucket, v[i]) : cuda::encode_4bit<false>(table.bucket, v[i]);
    if (got != expected) return i;
  }
  return -1;
}

// Every fp8 code through the decoder; every float of `v` through the encoder.
void fp8_decode_all(float* values) {
  for (uint32_t code = 0; code < 256; ++code) values[code] = cuda::fp8_to_float(code);
}
void fp8_encode(const float* v, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) codes[i] = uint8_t(cuda::float_to_fp8(v[i]));
}

// Number of n in {0, 1, d-1, d, d+1, multiples of d and their neighbours, 2^31-1} whose quotient is wrong.
int64_t check_divisor(uint32_t divisor) {
  const cuda::FastDivisor fast(divisor);
  int64_t wrong = 0;
  const auto check = [&](uint64_t n) { wrong += n < (uint64_t(1) << 31) && fast.quotient(uint32_t(n)) != n / divisor; };
  for (uint64_t n : {uint64_t(0), uint64_t(1), (uint64_t(1) << 31) - 1}) check(n);
  for (uint64_t multiple = 1; multiple * divisor < (uint64_t(1) << 31) + divisor; multiple = multiple * 9 / 8 + 1)
    for (uint64_t n : {multiple * divisor - 1, multiple * divisor, multiple * divisor + 1}) check(n);
  const uint64_t last = ((uint64_t(1) << 31) - 1) / divisor * divisor;
  for (uint64_t n : {last, last - 1, last + 1}) check(n);
  return wrong;
}

// Tiles of a grid as rows of (first_row, rows, first_item, items); returns how many there are, writes at most `most`.
int64_t tiles_of(int64_t rows, int64_t items_per_row, int64_t* out, int64_t most) {
  int64_t count = 0;
  cuda::for_each_tile(rows, items_per_row, [&](const cuda::Tile& t) {
    if (count < most) {
      const int64_t fields[4] = {t.first_row, t.rows, t.first_item, t.items};
      memcpy(out + 4 * count, fields, sizeof fields);
    }
    return ++count < most ? 0 : 1;
  });
  return count;
}

int access_width_of(uint64_t address, int64_t pitch) {
  return cuda::access_width(reinterpret_cast<const void*>(address), pitch);
}
}
#pragma GCC visibility pop
