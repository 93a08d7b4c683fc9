// Copy past the caches. Included by avx2.h and avx512.h, whose load_vector and store_vector it uses.
#pragma once

namespace halfbyte::cpu {
namespace {

// Any alignment: what does not fill a whole aligned vector at either end is copied through the caches.
inline void stream_copy(void* target, const void* source, int64_t bytes) {
  auto* to = static_cast<char*>(target);
  const auto* from = static_cast<const char*>(source);
  int64_t head = -reinterpret_cast<intptr_t>(to) & (kStreamAlignment - 1);
  head = head < bytes ? head : bytes;
  memcpy(to, from, size_t(head));
  int64_t i = head;
  for (; i + kStreamAlignment <= bytes; i += kStreamAlignment) store_vector<true>(to + i, load_vector(from + i));
  memcpy(to + i, from + i, size_t(bytes - i));
}

// Call after the last non-temporal store of a thread.
inline void stream_fence() { _mm_sfence(); }

}  // namespace
}  // namespace halfbyte::cpu
