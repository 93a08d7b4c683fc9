// Subnormal numbers count as zero in the optimizer's rules: decaying moments reach them, and they cost 4.7x on CPUs.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace halfbyte::cpu {

// Flushes subnormal results and inputs of this thread to zero while it lives, then restores what the thread had.
class FlushSubnormals {
 public:
#if defined(__SSE__)
  FlushSubnormals() : previous_(_mm_getcsr()) { _mm_setcsr(previous_ | 0x8040u); }  // FTZ and DAZ
  ~FlushSubnormals() { _mm_setcsr(previous_); }
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(previous_));
    asm volatile("msr fpcr, %0" : : "r"(previous_ | (uint64_t(1) << 24)));  // FZ
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(previous_)); }
#else
#error "halfbyte: say how this CPU flushes subnormal numbers to zero"
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__SSE__)
  unsigned previous_;
#else
  uint64_t previous_;
#endif
};

}  // namespace halfbyte::cpu
