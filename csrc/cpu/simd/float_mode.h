// IEEE arithmetic for the life of an object: subnormals kept, nearest even, whatever the calling thread had set
// (torch.set_flush_denormal(True) would change the bytes). The arithmetic must sit in a function of its own that is not
// inlined beside the object: compilers move floating point across a change of mode.
#pragma once

#include <stdint.h>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace halfbyte::cpu {
namespace {

class IEEEFloats {
 public:
#if defined(__SSE__)
  IEEEFloats() : previous_(_mm_getcsr()) { _mm_setcsr(0x1F80); }  // all exceptions masked, no FTZ, no DAZ
  ~IEEEFloats() { _mm_setcsr(previous_); }
#elif defined(__aarch64__)
  IEEEFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(previous_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
  }
  ~IEEEFloats() { asm volatile("msr fpcr, %0" : : "r"(previous_)); }
#else
#error "halfbyte: say how this CPU keeps subnormal numbers"
#endif
  IEEEFloats(const IEEEFloats&) = delete;
  IEEEFloats& operator=(const IEEEFloats&) = delete;

 private:
#if defined(__SSE__)
  unsigned previous_;
#else
  uint64_t previous_;
#endif
};

}  // namespace
}  // namespace halfbyte::cpu
