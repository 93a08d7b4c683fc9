// The registry behind workspace.h, and the ops that look at it: no tensor arguments, so one kernel for every backend.
#include "workspace.h"

#include <cstdlib>
#include <new>
#include <stdexcept>
#include <vector>

#include <torch/csrc/stable/library.h>

namespace halfbyte::cpu {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<WorkspaceSlot>> slots;  // expired when their thread has ended
};

// Never destroyed: threads may end after static destructors have run.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

std::vector<std::shared_ptr<WorkspaceSlot>> live_slots() {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  std::vector<std::shared_ptr<WorkspaceSlot>> live;
  for (const auto& slot : r.slots)
    if (auto alive = slot.lock()) live.push_back(std::move(alive));
  return live;
}

std::shared_ptr<WorkspaceSlot> new_slot() {
  auto slot = std::make_shared<WorkspaceSlot>();
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  std::erase_if(r.slots, [](const auto& other) { return other.expired(); });
  r.slots.push_back(slot);
  return slot;
}

void clear_workspace() {
  for (const auto& slot : live_slots()) {
    const std::lock_guard<std::mutex> lock(slot->busy);
    std::free(slot->data);
    slot->data = nullptr;
    slot->bytes = 0;
  }
}

int64_t workspace_bytes() {
  int64_t total = 0;
  for (const auto& slot : live_slots()) {
    const std::lock_guard<std::mutex> lock(slot->busy);
    total += slot->bytes;
  }
  return total;
}

}  // namespace

WorkspaceSlot::~WorkspaceSlot() { std::free(data); }

WorkspaceLease::WorkspaceLease(int64_t bytes) {
  thread_local const std::shared_ptr<WorkspaceSlot> own = new_slot();
  if (bytes > kWorkspaceLimit) throw std::logic_error("halfbyte: a kernel asked for more scratch than a thread may keep");
  slot_ = own;
  lock_ = std::unique_lock<std::mutex>(slot_->busy);
  if (slot_->bytes >= bytes) return;
  std::free(slot_->data);
  slot_->bytes = 0;
  slot_->data = std::aligned_alloc(64, size_t((bytes + 63) / 64 * 64));
  if (!slot_->data) throw std::bad_alloc();
  slot_->bytes = bytes;
}

}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CompositeExplicitAutograd, m) {
  m.impl("clear_workspace", TORCH_BOX(&halfbyte::cpu::clear_workspace));
  m.impl("workspace_bytes", TORCH_BOX(&halfbyte::cpu::workspace_bytes));
}
