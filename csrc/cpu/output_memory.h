// Memory of large outputs.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace halfbyte::cpu {

// Outputs of this size bypass the caches: past the last level of most machines nothing is read back from it anyway.
constexpr int64_t kStreamBytes = int64_t(16) << 20;

// Asks for 2 MiB pages under data[0..bytes) if it is large. A new tensor of 32 MiB otherwise takes 8192 page faults, which
// cost up to ten times what the kernel that fills it does. Only a hint: where the system declines, nothing changes.
inline void prefer_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr intptr_t kPage = 4096;
  if (bytes < (int64_t(4) << 20)) return;
  const intptr_t begin = (reinterpret_cast<intptr_t>(data) + kPage - 1) & -kPage;
  const intptr_t end = (reinterpret_cast<intptr_t>(data) + bytes) & -kPage;
  madvise(reinterpret_cast<void*>(begin), size_t(end - begin), MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace halfbyte::cpu
