// IEEE arithmetic for the life of an object: subnormals kept, nearest even, whatever the calling thread had set
// (torch.set_flush_denormal(True) would change the bytes). The arithmetic must sit in a function of its own that is not
// inlined beside the object: compilers move floating point across a change of mode.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace halfbyte::cpu {
namespace {

#if defined(__x86_64__)
class IEEEFloats {
 public:
  IEEEFloats() : previous_(_mm_getcsr()) { _mm_setcsr(0x1F80); }  // all exceptions masked, no FTZ, no DAZ
  ~IEEEFloats() { _mm_setcsr(previous_); }
  IEEEFloats(const IEEEFloats&) = delete;
  IEEEFloats& operator=(const IEEEFloats&) = delete;

 private:
  unsigned previous_;
};
#else
struct IEEEFloats {
  IEEEFloats() {}
  ~IEEEFloats() {}
};
#endif

}  // namespace
}  // namespace halfbyte::cpu
