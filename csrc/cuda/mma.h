// Tensor core and asynchronous copy instructions as named functions; tests/cuda/emulator.h has the forms for the CPU.
#pragma once

#include "elements.h"
#include "launch.h"

#if !defined(HALFBYTE_EMULATE_CUDA)

namespace halfbyte::cuda {

// d += a * b for one warp, fp32 accumulators. a: 16x16, rows g and g + 8 of lane 4 g + t: a[0] = (g; 2t, 2t+1),
// a[1] = (g+8; 2t, 2t+1), a[2] = (g; 2t+8, 2t+9), a[3] = (g+8; 2t+8, 2t+9). b: 16x8, b[0] = (2t, 2t+1; g),
// b[1] = (2t+8, 2t+9; g). d: 16x8, (g; 2t), (g; 2t+1), (g+8; 2t), (g+8; 2t+1). Two 16-bit values a register, lower first.
template <class T>
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// Two 16-bit products, each rounded to nearest even.
template <class T>
__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b) {
  uint32_t d;
  if constexpr (std::is_same_v<T, BFloat16>) {
    // sm_80 has no bf16 product of its own; -0 leaves every product as it is.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  }
  return d;
}

// Asks L2 for the 32 bytes at p.
__device__ inline void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// The same pointer, made once: ptxas would rather make it again in every turn of a loop than give it two registers.
template <class T>
__device__ inline const T* kept(const T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// One lane's column of a table [256][32] in shared memory.
class LaneTable {
 public:
  __device__ explicit LaneTable(const uint32_t* table) : base_(uint32_t(__cvta_generic_to_shared(table)) + threadIdx.x % 32 * 4) {
    asm volatile("" : "+r"(base_));  // made once, as in kept()
  }
  // The entry of byte `i` of `word`. Its address, base + 128 * byte, is one dot product of bytes; with the load 1 instruction a weight.
  __device__ uint32_t decode(uint32_t word, int i) const {
    uint32_t entry;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(entry) : "r"(__dp4a(word, 0x80u << (8 * i), base_)) : "memory");
    return entry;
  }

 private:
  uint32_t base_;
};

// A table of 256 floats in shared memory, looked up by the bytes of a word: address and load, like LaneTable.
class ByteTable {
 public:
  __device__ explicit ByteTable(const float* table) : base_(uint32_t(__cvta_generic_to_shared(table))) {
    asm volatile("" : "+r"(base_));
  }
  __device__ float at(uint32_t word, int i) const {
    float entry;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(entry) : "r"(__dp4a(word, 4u << (8 * i), base_)) : "memory");
    return entry;
  }

 private:
  uint32_t base_;
};

// A table [256][16] of two floats in shared memory, a copy for each lane of a half warp: 64-bit loads do not conflict. `part` is the
// byte of a word that the lane looks up.
class PairTable {
 public:
  __device__ PairTable(const float2* table, int part)
      : base_(uint32_t(__cvta_generic_to_shared(table)) + threadIdx.x % 16 * 8), byte_(0x80u << (8 * part)) {
    asm volatile("" : "+r"(base_), "+r"(byte_));
  }
  __device__ float2 at(uint32_t word) const { return entry(__dp4a(word, byte_, base_)); }
  // The same for byte `i`.
  __device__ float2 at(uint32_t word, int i) const { return entry(__dp4a(word, 0x80u << (8 * i), base_)); }

 private:
  __device__ static float2 entry(uint32_t address) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
    return pair;
  }
  uint32_t base_, byte_;
};

// 8 bytes that are read once: they do not displace the activations in L1. L2 fetches the whole line, which the same warp wants next.
__device__ inline uint2 load_once(const uint8_t* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

// The same of 16 bytes.
__device__ inline uint4 load_once_16(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Four 8 x 8 matrices of 16-bit values in shared memory, transposed: lane 8 i + r has the address of row r of matrix i, 16 bytes; lane
// 4 g + t gets of each the values g of rows 2 t and 2 t + 1, lower first.
__device__ inline void load_matrices_transposed(const void* row, uint32_t (&d)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

// cp.async: 16 bytes from global to shared memory, both 16-byte aligned, past L1; L2 fetches the whole line, as in load_once. Zeros
// where `there` is false (src-size 0: then `from` is not read). A thread's copies since its last commit are a group; wait<N> returns
// once all but its last N groups have arrived, which other threads see after a barrier.
__device__ inline void copy_async(void* to, const void* from, bool there, bool wanted = true) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;}"
               :: "r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from), "r"(there ? 16 : 0), "r"(int(wanted))
               : "memory");
}
// 4 bytes, through L1.
__device__ inline void copy_async_4(void* to, const void* from, bool there, bool wanted = true) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.ca.shared.global [%0], [%1], 4, %2;}"
               :: "r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from), "r"(there ? 4 : 0), "r"(int(wanted))
               : "memory");
}
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

// The launch's dynamic shared memory.
template <class T>
__device__ inline T* dynamic_shared() {
  extern __shared__ uint4 halfbyte_dynamic_shared[];
  return reinterpret_cast<T*>(halfbyte_dynamic_shared);
}

}  // namespace halfbyte::cuda

#endif
