// Between emulator.cpp's scheduler and emulator_wgmma.cpp.
#pragma once

#include "emulator.h"

namespace halfbyte::emulator {

constexpr unsigned kWarpgroup = 128;

void syncwarpgroup();  // all 128 threads, after each has posted what it is about; then wgmma_run(first thread) is called
cudaError_t wgmma_run(unsigned first);
void wgmma_start(unsigned threads, void* shared, size_t bytes);  // of a CTA
void wgmma_barrier();                                            // a CTA's barrier is complete
void wgmma_written(const void* to, size_t bytes);                // a cp.async has landed
void wgmma_arrived(const void* to, size_t bytes);                // the calling thread has waited for its own

}  // namespace halfbyte::emulator
