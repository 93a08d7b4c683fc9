// Runs the kernels of csrc/cuda on the CPU, so that tests compare whole kernels byte for byte without a GPU.
//
// The .cu files are compiled by the host compiler with this file in the place of csrc/cuda/launch.h. Every CUDA thread is a
// fiber; a CTA's fibers run one after another and stop at barriers and warp exchanges. What that proves: index arithmetic,
// geometry, masks, partial warps, barriers that not every thread reaches (an error here), and, by running the fibers in
// both orders, most races on shared memory. Asynchronous copies happen as late as their waits allow, and in the reversed order as
// soon as they are issued: a missing wait, or a buffer filled while others still read it, shows as a difference. So do wgmma,
// independently of it (emulator_wgmma.cpp). What it does not prove: memory ordering but for wgmma's, alignment faults of plain
// accesses, speed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __forceinline__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __constant__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx (::halfbyte::emulator::current.thread)
#define blockIdx (::halfbyte::emulator::current.block)
#define blockDim (::halfbyte::emulator::current.block_dim)
#define gridDim (::halfbyte::emulator::current.grid_dim)
#define HALFBYTE_DEVICE_ASSERT(condition) \
  do {                                    \
    if (!(condition)) ::halfbyte::emulator::fail_thread(cudaErrorAssert); \
  } while (0)

namespace halfbyte::emulator {

struct Current {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
extern Current current;

void syncthreads();
void syncwarp();                              // all 32 threads of the warp
void* warp_slot(unsigned lane);               // 16 bytes per lane of the calling thread's warp
void* dynamic_shared();
[[noreturn]] void fail_thread(cudaError_t error);
cudaError_t run(unsigned grid_x, unsigned grid_y, unsigned block, size_t shared_bytes, const std::function<void()>& kernel);
int launches();                               // so far
void set_reversed(bool reversed);             // order in which the fibers of a CTA run
// The calling thread's cp.async of 4 or 16 bytes (src-size 0: zeros), commit_group and wait_group, by the PTX ISA's sections of these names:
// wait_group N waits until at most the N last groups are pending and all before them are complete, for this thread alone.
void copy_async(void* to, const void* from, size_t bytes, bool there);
void copy_async_commit();
void copy_async_wait(size_t groups);

// Dynamic shared memory starts at this address of the shared window: a multiple of 16 and of nothing more, as a launch promises.
constexpr uint32_t kDynamicStart = 1040;
// wgmma of 64 x columns x 16, by the PTX ISA's sections of these names; `value` widens a 16-bit operand.
void set_wgmma_late(bool late);               // at the wait that asks for it, or as soon as it is issued
void fence_async_proxy();
void wgmma_fence(const float* d, size_t registers, const uint32_t* a, size_t a_registers);
void wgmma(float* d, unsigned columns, const uint32_t* a, uint64_t descriptor, float (*value)(uint16_t));
void wgmma_commit();
void wgmma_wait(unsigned groups);
// Address in the shared window of element (n, k) of a K-major operand of 16-bit values.
uint32_t wgmma_address(uint64_t descriptor, unsigned n, unsigned k);

template <class T>
T exchange(T value, unsigned source_lane) {
  static_assert(sizeof(T) <= 16);
  memcpy(warp_slot(current.thread.x % 32), &value, sizeof(T));
  syncwarp();
  memcpy(&value, warp_slot(source_lane), sizeof(T));
  syncwarp();
  return value;
}

}  // namespace halfbyte::emulator

inline void __syncthreads() { halfbyte::emulator::syncthreads(); }
inline void __syncwarp(unsigned = 0xFFFFFFFFu) { halfbyte::emulator::syncwarp(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return halfbyte::emulator::exchange(value, (threadIdx.x % 32) ^ unsigned(mask));
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return halfbyte::emulator::exchange(value, unsigned(lane) % 32);
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
// Byte i of the result is the byte of (high, low) that nibble i of the selector names.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = uint64_t(high) << 32 | low;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) result |= unsigned(both >> (8 * (selector >> (4 * i) & 7)) & 0xFFu) << (8 * i);
  return result;
}
using std::max;
using std::min;

namespace halfbyte::cuda {

inline uint2 load_once(const uint8_t* p) {
  uint2 v;
  memcpy(&v, p, 8);
  return v;
}

inline uint4 load_once_16(const uint8_t* p) {
  uint4 v;
  memcpy(&v, p, 16);
  return v;
}

inline void prefetch_l2(const void*) {}
template <class T>
const T* kept(const T* p) {
  return p;
}

class LaneTable {
 public:
  explicit LaneTable(const uint32_t* table) : table_(table + threadIdx.x % 32) {}
  uint32_t decode(uint32_t word, int i) const { return table_[((word >> (8 * i)) & 0xFFu) * 32]; }

 private:
  const uint32_t* table_;
};

class ByteTable {
 public:
  explicit ByteTable(const float* table) : table_(table) {}
  float at(uint32_t word, int i) const { return table_[(word >> (8 * i)) & 0xFFu]; }

 private:
  const float* table_;
};

class PairTable {
 public:
  PairTable(const float2* table, int part) : table_(table + threadIdx.x % 16), shift_(8 * part) {}
  float2 at(uint32_t word) const { return table_[((word >> shift_) & 0xFFu) * 16]; }
  float2 at(uint32_t word, int i) const { return table_[((word >> (8 * i)) & 0xFFu) * 16]; }

 private:
  const float2* table_;
  int shift_;
};

// One register of a fragment as two floats.
template <class T>
void halves(uint32_t word, float (&out)[2]) {
  T pair[2];
  memcpy(static_cast<void*>(pair), &word, 4);
  for (int i = 0; i < 2; ++i) out[i] = float(pair[i]);
}

template <class T>
uint32_t multiply_pair(uint32_t a, uint32_t b) {
  float x[2], y[2];
  halves<T>(a, x);
  halves<T>(b, y);
  const T pair[2] = {T(x[0] * y[0]), T(x[1] * y[1])};  // exact in fp32, rounded once
  uint32_t word;
  memcpy(&word, pair, 4);
  return word;
}

// mma.sync.m16n8k16: products in fp32 exactly, added in fp32 in the order of k (the hardware's order is not documented).
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float rows[2][16], columns[2][16], pair[2];
  memcpy(emulator::warp_slot(lane), a, 16);
  emulator::syncwarp();
  for (unsigned other = 0; other < 4; ++other) {
    uint32_t theirs[4];
    memcpy(theirs, emulator::warp_slot(4 * g + other), 16);
    for (unsigned r = 0; r < 4; ++r) {
      halves<T>(theirs[r], pair);
      for (unsigned i = 0; i < 2; ++i) rows[r % 2][2 * other + i + 8 * (r / 2)] = pair[i];
    }
  }
  emulator::syncwarp();
  memcpy(emulator::warp_slot(lane), b, 8);
  emulator::syncwarp();
  for (unsigned c = 0; c < 2; ++c) {
    for (unsigned other = 0; other < 4; ++other) {
      uint32_t theirs[2];
      memcpy(theirs, emulator::warp_slot(4 * (2 * t + c) + other), 8);
      for (unsigned r = 0; r < 2; ++r) {
        halves<T>(theirs[r], pair);
        for (unsigned i = 0; i < 2; ++i) columns[c][2 * other + i + 8 * r] = pair[i];
      }
    }
  }
  emulator::syncwarp();
  for (unsigned i = 0; i < 4; ++i)
    for (unsigned k = 0; k < 16; ++k) d[i] += rows[i / 2][k] * columns[i % 2][k];
}

inline uint32_t shared_address(const void* p) {
  return emulator::kDynamicStart + uint32_t(static_cast<const char*>(p) - static_cast<const char*>(emulator::dynamic_shared()));
}

// ldmatrix.x4.trans: lane 8 i + r has row r of matrix i; a lane's register i is matrix i's column lane / 4, of rows 2 (lane % 4) and
// the next.
inline void load_matrices_transposed(const void* row, uint32_t (&d)[4]) {
  if (shared_address(row) % 16 != 0) emulator::fail_thread(cudaErrorMisalignedAddress);
  const unsigned lane = threadIdx.x % 32;
  memcpy(emulator::warp_slot(lane), row, 16);
  emulator::syncwarp();
  for (unsigned i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (unsigned r = 0; r < 2; ++r)
      memcpy(&pair[r], static_cast<char*>(emulator::warp_slot(8 * i + lane % 4 * 2 + r)) + lane / 4 * 2, 2);
    memcpy(&d[i], pair, 4);
  }
  emulator::syncwarp();
}

inline void copy_async(void* to, const void* from, bool there, bool wanted = true) {
  if (wanted) emulator::copy_async(to, from, 16, there);
}
inline void copy_async_4(void* to, const void* from, bool there, bool wanted = true) {
  if (wanted) emulator::copy_async(to, from, 4, there);
}
inline void copy_async_commit() { emulator::copy_async_commit(); }
template <int N>
void copy_async_wait() {
  emulator::copy_async_wait(N);
}

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(emulator::dynamic_shared());
}

inline void fence_async_proxy() { emulator::fence_async_proxy(); }
template <int Registers, int Steps>
void wgmma_fence(float (&d)[Registers], uint32_t (&a)[Steps][4]) {
  emulator::wgmma_fence(d, Registers, &a[0][0], Steps * 4);
}
template <class T>
float widened(uint16_t bits) {
  T value;
  memcpy(static_cast<void*>(&value), &bits, 2);
  return float(value);
}
template <class T, int Registers>
void wgmma(float (&d)[Registers], const uint32_t (&a)[4], uint64_t b) {
  emulator::wgmma(d, 2 * Registers, a, b, widened<T>);
}
inline void wgmma_commit() { emulator::wgmma_commit(); }
template <int N, int Registers>
void wgmma_wait(float (&)[Registers]) {
  emulator::wgmma_wait(N);
}

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), unsigned grid_x, unsigned grid_y, unsigned block, size_t shared_bytes,
                   cudaStream_t, Args&&... args) {
  return emulator::run(grid_x, grid_y, block, shared_bytes, [&] { kernel(args...); });
}
inline int multiprocessors() { return 2; }
inline int compute_capability() { return 90; }

}  // namespace halfbyte::cuda
