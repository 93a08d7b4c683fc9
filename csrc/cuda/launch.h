// Launching a kernel: the error comes back from the launch itself, not from a sticky state somebody else may have set.
//
// tests/cuda/emulator.h takes this file's place when the kernels are compiled for the CPU (-DHALFBYTE_EMULATE_CUDA).
#pragma once

#if defined(HALFBYTE_EMULATE_CUDA)
#include "../../tests/cuda/emulator.h"
#else

#undef NDEBUG  // device assertions are part of the ops' behaviour
#include <cassert>
#include <utility>

#include <cuda_runtime.h>

// A condition only the device can know. Failing stops the kernel; the next synchronizing call raises, as in torch.
#define HALFBYTE_DEVICE_ASSERT(condition) assert(condition)

namespace halfbyte::cuda {

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), unsigned grid_x, unsigned grid_y, unsigned block, size_t shared_bytes,
                   cudaStream_t stream, Args&&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid_x, grid_y, 1);
  config.blockDim = dim3(block, 1, 1);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  if (shared_bytes > 0) {  // past 48 KB it has to be asked for, per kernel and device; nothing of it is captured by a graph
    const cudaError_t refused = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
    if (refused != cudaSuccess) return (void)cudaGetLastError(), refused;
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  if (error != cudaSuccess) (void)cudaGetLastError();  // reported by our caller: do not leave it for the next one
  return error;
}

// Multiprocessors of the current device; one attribute query per call (0.1 us), so nothing can go stale.
inline int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess || count <= 0) {
    (void)cudaGetLastError();
    return 1;
  }
  return count;
}

// 10 * major + minor of the current device.
inline int compute_capability() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return 10 * major + minor;
}

}  // namespace halfbyte::cuda

#endif
