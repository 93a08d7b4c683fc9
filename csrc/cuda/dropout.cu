// Masks of dropout, and what they keep. One thread makes or reads a byte of a mask: one Philox block, or 8 elements, which it moves
// 16 bytes at a time where rows allow it.
#include "../dropout.h"
#include "geometry.h"
#include "kernels.h"
#include "launch.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) mask_kernel(const int64_t* seed, uint32_t dropped, int64_t bytes, uint8_t* mask) {
  const uint64_t number = uint64_t(*seed);
  for (int64_t b = int64_t(blockIdx.x) * kThreads + threadIdx.x; b < bytes; b += int64_t(gridDim.x) * kThreads) {
    const Philox p = philox(uint64_t(b), kDropoutStep, number);
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) bits |= uint32_t(random16(p, i) >= dropped) << i;
    mask[b] = uint8_t(bits);
  }
}

struct KeepArgs {
  const void* input;
  const uint8_t* mask;  // of the tile's first row
  void* output;
  int64_t columns, mask_stride;
  int64_t first_byte;  // of the tile within a row
  FastDivisor bytes;   // of a row in the tile
  uint32_t total;
  bool wide;           // rows lie on multiples of 16 bytes
};

template <class T>
struct alignas(16) Words16 {
  T word[16 / sizeof(T)];
};

// T: elements as unsigned words, whatever they stand for.
template <class T>
__global__ void __launch_bounds__(kThreads) keep_kernel(const __grid_constant__ KeepArgs a) {
  constexpr int kPerMove = 16 / int(sizeof(T));
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= a.total) return;
  const uint32_t row = a.bytes.quotient(index);
  const int64_t byte = a.first_byte + (index - row * a.bytes.divisor), column = 8 * byte;
  const uint32_t bits = a.mask[row * a.mask_stride + byte];
  const T* from = static_cast<const T*>(a.input) + row * a.columns + column;
  T* to = static_cast<T*>(a.output) + row * a.columns + column;
  if (a.wide && column + 8 <= a.columns) {
#pragma unroll
    for (int m = 0; m < 8 / kPerMove; ++m) {
      Words16<T> words = reinterpret_cast<const Words16<T>*>(from)[m];
#pragma unroll
      for (int i = 0; i < kPerMove; ++i) words.word[i] = bits >> (m * kPerMove + i) & 1u ? words.word[i] : T(0);
      reinterpret_cast<Words16<T>*>(to)[m] = words;
    }
    return;
  }
  for (int i = 0; i < 8 && column + i < a.columns; ++i) to[i] = bits >> i & 1u ? from[i] : T(0);
}

}  // namespace

cudaError_t launch_dropout_mask(const int64_t* seed, uint32_t dropped, int64_t bytes, uint8_t* mask, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  const int64_t blocks = (bytes + kThreads - 1) / kThreads, most = 8 * int64_t(multiprocessors());
  return launch(mask_kernel, unsigned(blocks < most ? blocks : most), 1, kThreads, 0, stream, seed, dropped, bytes, mask);
}

cudaError_t launch_keep(const void* input, DType dtype, int64_t rows, int64_t columns, const uint8_t* mask, void* output,
                        cudaStream_t stream) {
  const int64_t element_size = dtype == DType::kFloat32 ? 4 : 2, row_bytes = columns * element_size, bytes = mask_bytes(columns);
  return for_each_tile(rows, bytes, [&](const Tile& tile) {
    KeepArgs a{};
    a.input = static_cast<const char*>(input) + tile.first_row * row_bytes;
    a.mask = mask + tile.first_row * bytes;
    a.output = static_cast<char*>(output) + tile.first_row * row_bytes;
    a.columns = columns, a.mask_stride = bytes, a.first_byte = tile.first_item;
    a.bytes = FastDivisor(uint32_t(tile.items));
    a.total = uint32_t(tile.rows * tile.items);
    a.wide = access_width(input, row_bytes) >= 16 && access_width(output, row_bytes) >= 16;
    const unsigned blocks = (a.total + kThreads - 1) / kThreads;
    return element_size == 4 ? launch(keep_kernel<uint32_t>, blocks, 1, kThreads, 0, stream, a)
                             : launch(keep_kernel<uint16_t>, blocks, 1, kThreads, 0, stream, a);
  });
}

}  // namespace halfbyte::cuda
