// Warpgroup products (wgmma, compute capability 9.0 alone) as named functions; tests/cuda/emulator.h has the forms for the CPU.
//
// 128 threads of four warps multiply 64 rows of A, in their registers, with up to 256 columns of B, in shared memory,
// asynchronously: registers and shared memory belong to the instruction until a wait says that it is done. Sources: PTX ISA,
// "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions"; for layouts also CUTLASS, include/cute/arch/
// mma_sm90_desc.hpp (GmmaDescriptor) and include/cute/atom/mma_traits_sm90_gmma.hpp (ALayout_64x16, CLayout_64xN, make_gmma_desc).
#pragma once

#include "mma.h"

namespace halfbyte::cuda {

// A descriptor of B, K-major with 128-byte swizzle: row n of B (a column of the product) takes 128 bytes, 64 values along k, and
// 8 rows are one pattern of 1024 bytes at a multiple of 1024; the 16-byte unit u of row n lies at u ^ (n % 8). Bits, in units of
// 16 bytes: 0-13 start; 16-29 leading offset, of no meaning in this mode, 1 as CUTLASS has it; 32-45 stride from 8 rows to the
// next; 49-51 the pattern's own offset, 0 where it starts at a multiple of 1024; 62-63 the mode, 1.
constexpr uint32_t kSwizzledRow = 128, kSwizzledPattern = 8 * kSwizzledRow;
HALFBYTE_HD constexpr uint64_t swizzled_descriptor(uint32_t shared_address) {
  return uint64_t((shared_address & 0x3FFFFu) >> 4) | uint64_t(1) << 16 | uint64_t(kSwizzledPattern >> 4) << 32 | uint64_t(1) << 62;
}
// 16 values further along k: 32 bytes; the hardware swizzles the sum.
constexpr uint64_t kDescriptorK16 = 32 >> 4;

}  // namespace halfbyte::cuda

#if !defined(HALFBYTE_EMULATE_CUDA)

namespace halfbyte::cuda {

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Makes the calling thread's writes to shared memory visible to wgmma of the threads that pass a barrier with it afterwards.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders earlier accesses to the registers `d` and `a` before wgmma's: to be called before the first of several wgmma that use
// them. The empty statements, no instructions, keep the compiler from moving accesses past it.
template <int Registers, int Steps>
__device__ inline void wgmma_fence(float (&d)[Registers], uint32_t (&a)[Steps][4]) {
#pragma unroll
  for (int i = 0; i < Registers; ++i) asm volatile("" : "+f"(d[i])::"memory");
#pragma unroll
  for (int i = 0; i < Steps * 4; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// What a thread's warpgroup has issued since the last commit is a group; wait<N> returns once all but its last N groups are done,
// so that `d` and every `a` of those groups may be used again.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N, int Registers>
__device__ inline void wgmma_wait(float (&d)[Registers]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
  if constexpr (N == 0) {  // with groups pending `d` is still theirs
#pragma unroll
    for (int i = 0; i < Registers; ++i) asm volatile("" : "+f"(d[i])::"memory");
  }
}

#define HALFBYTE_REGISTERS_0 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29" \
  ",%30,%31"
#define HALFBYTE_REGISTERS_1 \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59" \
  ",%60,%61,%62,%63"
#define HALFBYTE_REGISTERS_2 \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91" \
  ",%92,%93,%94,%95"
#define HALFBYTE_REGISTERS_3 \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118" \
  ",%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define HALFBYTE_SUMS_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define HALFBYTE_SUMS_32(i) HALFBYTE_SUMS_8(i), HALFBYTE_SUMS_8(i + 8), HALFBYTE_SUMS_8(i + 16), HALFBYTE_SUMS_8(i + 24)
// %s are the registers of d, then 4 of a, then the descriptor; all factors 1, B as it lies.
#define HALFBYTE_WGMMA(n, type, registers, operands, ...)                                                                 \
  asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {"   \
               registers "}, " operands ", p, 1, 1, 0;}"                                                                  \
               : __VA_ARGS__                                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d += a * b: 64 x Tokens of fp32. Warp w of the warpgroup has rows 16 w .. 16 w + 15, its lane 4 g + t of a: (g; 2t, 2t+1),
// (g+8; 2t, 2t+1), (g; 2t+8, 2t+9), (g+8; 2t+8, 2t+9), two 16-bit values a register, lower first, as mma_m16n8k16 takes them; of d,
// for each 8 columns: (g; 2t), (g; 2t+1), (g+8; 2t), (g+8; 2t+1). b describes Tokens rows of 16 values.
template <class T, int Registers>
__device__ inline void wgmma(float (&d)[Registers], const uint32_t (&a)[4], uint64_t b) {
  static_assert(Registers == 32 || Registers == 64 || Registers == 96 || Registers == 128);
  constexpr bool kBF16 = std::is_same_v<T, BFloat16>;
  if constexpr (Registers == 32 && kBF16) {
    HALFBYTE_WGMMA(64, "bf16", HALFBYTE_REGISTERS_0, "{%32,%33,%34,%35}, %36",
                   HALFBYTE_SUMS_32(0));
  } else if constexpr (Registers == 32 && !kBF16) {
    HALFBYTE_WGMMA(64, "f16", HALFBYTE_REGISTERS_0, "{%32,%33,%34,%35}, %36",
                   HALFBYTE_SUMS_32(0));
  } else if constexpr (Registers == 64 && kBF16) {
    HALFBYTE_WGMMA(128, "bf16", HALFBYTE_REGISTERS_0 HALFBYTE_REGISTERS_1, "{%64,%65,%66,%67}, %68",
                   HALFBYTE_SUMS_32(0), HALFBYTE_SUMS_32(32));
  } else if constexpr (Registers == 64 && !kBF16) {
    HALFBYTE_WGMMA(128, "f16", HALFBYTE_REGISTERS_0 HALFBYTE_REGISTERS_1, "{%64,%65,%66,%67}, %68",
                   HALFBYTE_SUMS_32(0), HALFBYTE_SUMS_32(32));
  } else if constexpr (Registers == 96 && kBF16) {
    HALFBYTE_WGMMA(192, "bf16", HALFBYTE_REGISTERS_0 HALFBYTE_REGISTERS_1 HALFBYTE_REGISTERS_2, "{%96,%97,%98,%99}, %100",
                   HALFBYTE_SUMS_32(0), HALFBYTE_SUMS_32(32), HALFBYTE_SUMS_32(64));
  } else if constexpr (Registers == 96 && !kBF16) {
    HALFBYTE_WGMMA(192, "f16", HALFBYTE_REGISTERS_0 HALFBYTE_REGISTERS_1 HALFBYTE_REGISTERS_2, "{%96,%97,%98,%99}, %100",
                   HALFBYTE_SUMS_32(0), HALFBYTE_SUMS_32(32), HALFBYTE_SUMS_32(64));
  } else if constexpr (Registers == 128 && kBF16) {
    HALFBYTE_WGMMA(256, "bf16", HALFBYTE_REGISTERS_0 HALFBYTE_REGISTERS_1 HALFBYTE_REGISTERS_2 HALFBYTE_REGISTERS_3,
                   "{%128,%129,%130,%131}, %132",
                   HALFBYTE_SUMS_32(0), HALFBYTE_SUMS_32(32), HALFBYTE_SUMS_32(64), HALFBYTE_SUMS_32(96));
  } else if constexpr (Registers == 128 && !kBF16) {
    HALFBYTE_WGMMA(256, "f16", HALFBYTE_REGISTERS_0 HALFBYTE_REGISTERS_1 HALFBYTE_REGISTERS_2 HALFBYTE_REGISTERS_3,
                   "{%128,%129,%130,%131}, %132",
                   HALFBYTE_SUMS_32(0), HALFBYTE_SUMS_32(32), HALFBYTE_SUMS_32(64), HALFBYTE_SUMS_32(96));
  }
}
#undef HALFBYTE_REGISTERS_0
#undef HALFBYTE_REGISTERS_1
#undef HALFBYTE_REGISTERS_2
#undef HALFBYTE_REGISTERS_3
#undef HALFBYTE_SUMS_8
#undef HALFBYTE_SUMS_32
#undef HALFBYTE_WGMMA

}  // namespace halfbyte::cuda

#endif
