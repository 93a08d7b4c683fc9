// Scratch memory that a thread keeps between calls: fresh buffers would cost a page fault every 4 KiB of every call.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

namespace halfbyte::cpu {

// What one thread may keep.
inline constexpr int64_t kWorkspaceLimit = int64_t(4) << 20;

struct WorkspaceSlot {
  std::mutex busy;  // held while a lease is alive, so that clear_workspace never frees memory in use
  void* data = nullptr;
  int64_t bytes = 0;
  ~WorkspaceSlot();
};

// The calling thread's scratch for as long as this object lives, 64-byte aligned, contents undefined. One per thread at a
// time. Throws std::bad_alloc; `bytes` above kWorkspaceLimit is a std::logic_error.
class WorkspaceLease {
 public:
  explicit WorkspaceLease(int64_t bytes);
  void* data() const { return slot_->data; }

 private:
  std::shared_ptr<WorkspaceSlot> slot_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace halfbyte::cpu
