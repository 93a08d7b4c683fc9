// Memory of large outputs.
#pragma once

#include <cstdint>

#include "../bridge.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace halfbyte::cpu {

constexpr intptr_t kPageBytes = 4096;

// Asks for 2 MiB pages under data[0..bytes) if it is large. A new tensor of 32 MiB otherwise takes 8192 page faults, which
// cost up to ten times what the kernel that fills it does. Only a hint: where the system declines, nothing changes.
inline void prefer_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (bytes < (int64_t(4) << 20)) return;
  const intptr_t begin = (reinterpret_cast<intptr_t>(data) + kPageBytes - 1) & -kPageBytes;
  const intptr_t end = (reinterpret_cast<intptr_t>(data) + bytes) & -kPageBytes;
  madvise(reinterpret_cast<void*>(begin), size_t(end - begin), MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

// As new_tensor, for what may be large and is written as a whole.
inline Tensor new_buffer(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  Tensor buffer = new_tensor(like, sizes, dtype);
  prefer_huge_pages(buffer.mutable_data_ptr(), buffer.numel() * int64_t(buffer.element_size()));
  return buffer;
}

// Outputs of this size bypass the caches: past the last level of most machines nothing is read back from it anyway. (Where L3 is larger, a
// buffer is found there only after many calls have written the same one.)
constexpr int64_t kStreamBytes = int64_t(16) << 20;

// Whether data[0..bytes) has no memory yet (its middle, which stands for all of it). The system clears pages as they are touched, and what
// is stored next finds the zeros in the caches; past them, the zeros would be written to memory first.
inline bool is_untouched(const void* data, int64_t bytes) {
#if defined(__linux__)
  const intptr_t middle = (reinterpret_cast<intptr_t>(data) + bytes / 2) & -kPageBytes;
  unsigned char resident = 1;
  return mincore(reinterpret_cast<void*>(middle), 1, &resident) == 0 && !(resident & 1);
#else
  (void)data, (void)bytes;
  return false;
#endif
}

// Whether the output data[0..bytes), one of several that are written before the first is read, `together` bytes in all, should bypass the
// caches.
inline bool bypasses_caches(const void* data, int64_t bytes, int64_t together) {
  return together >= kStreamBytes && !is_untouched(data, bytes);
}

}  // namespace halfbyte::cpu
