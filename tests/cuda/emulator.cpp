// The scheduler of emulator.h, and the C entry points that tests/cuda/emulated.py calls.
#include "emulator_wgmma.h"

#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <ucontext.h>
#include <vector>

namespace halfbyte::emulator {

Current current;

namespace {

constexpr size_t kStackBytes = 128 * 1024;

enum class State { kReady, kAtBarrier, kAtWarp, kAtWarpgroup, kDone };

struct Copy {
  void* to;
  const void* from;  // null: zeros
  size_t bytes;
  void run() const {
    if (from) memcpy(to, from, bytes);
    else memset(to, 0, bytes);
    wgmma_written(to, bytes);
  }
};

// A fiber is created once with ucontext and from then on switched with _setjmp/_longjmp, which make no system call.
struct Fiber {
  ucontext_t context;
  jmp_buf resume;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  State state = State::kDone;
  bool started = false;
  std::vector<Copy> open;                // cp.async since the last commit
  std::deque<std::vector<Copy>> groups;  // committed, the oldest first
};

std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<std::array<std::byte, 32 * 16>> slots;
std::vector<std::max_align_t> shared_memory;
size_t shared_size = 0;
const std::function<void()>* body = nullptr;
Fiber* running = nullptr;
jmp_buf scheduler;
ucontext_t creator;
cudaError_t error = cudaSuccess;
bool reversed_order = false;
int launched = 0;

void yield(State state) {
  Fiber* self = running;
  self->state = state;
  if (_setjmp(self->resume) == 0) _longjmp(scheduler, 1);
}

void fiber_main() {
  for (;;) {
    (*body)();
    yield(State::kDone);
  }
}

void switch_to(unsigned index) {
  Fiber& fiber = *fibers[index];
  current.thread = {index, 0, 0};
  running = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
  swapcontext(&creator, &fiber.context);
}

// Releases threads whose barrier is complete; false when nobody can go on.
bool release(unsigned threads) {
  unsigned done = 0, waiting = 0;
  bool progress = false;
  for (unsigned t = 0; t < threads; ++t) {
    done += fibers[t]->state == State::kDone;
    waiting += fibers[t]->state == State::kAtBarrier;
  }
  if (waiting > 0 && waiting + done == threads) {
    for (unsigned t = 0; t < threads; ++t)
      if (fibers[t]->state == State::kAtBarrier) fibers[t]->state = State::kReady;
    wgmma_barrier();
    return true;
  }
  for (unsigned w = 0; w < threads; w += 32) {
    unsigned there = 0;
    for (unsigned t = w; t < w + 32 && t < threads; ++t) there += fibers[t]->state == State::kAtWarp;
    if (there != 32) continue;
    for (unsigned t = w; t < w + 32; ++t) fibers[t]->state = State::kReady;
    progress = true;
  }
  if (progress) return true;
  // One warpgroup at a time, which then runs ahead of the others as far as barriers let it.
  const unsigned groups = threads / kWarpgroup;
  for (unsigned i = 0; i < groups; ++i) {
    const unsigned first = (reversed_order ? groups - 1 - i : i) * kWarpgroup;
    bool all = true;
    for (unsigned t = first; t < first + kWarpgroup; ++t) all = all && fibers[t]->state == State::kAtWarpgroup;
    if (!all) continue;
    if (const cudaError_t refused = wgmma_run(first); refused != cudaSuccess) error = refused;
    for (unsigned t = first; t < first + kWarpgroup; ++t) fibers[t]->state = State::kReady;
    return true;
  }
  return false;
}

void run_cta(unsigned threads) {
  for (unsigned t = 0; t < threads; ++t) {
    fibers[t]->state = State::kReady;
    fibers[t]->open.clear();
    fibers[t]->groups.clear();
  }
  wgmma_start(threads, shared_memory.data(), shared_size);
  for (;;) {
    for (unsigned i = 0; i < threads; ++i) {
      const unsigned t = reversed_order ? threads - 1 - i : i;
      if (fibers[t]->state == State::kReady) switch_to(t);
      if (error != cudaSuccess) return;
    }
    bool all_done = true;
    for (unsigned t = 0; t < threads; ++t) all_done = all_done && fibers[t]->state == State::kDone;
    if (all_done) return;
    if (!release(threads)) {  // threads of one CTA or warp wait for each other at different places
      error = cudaErrorLaunchTimeout;
      return;
    }
    if (error != cudaSuccess) return;
  }
}

}  // namespace

void syncthreads() { yield(State::kAtBarrier); }
void syncwarp() { yield(State::kAtWarp); }
void syncwarpgroup() { yield(State::kAtWarpgroup); }
void* warp_slot(unsigned lane) { return slots[current.thread.x / 32].data() + 16 * lane; }
void* dynamic_shared() { return shared_memory.data(); }
int launches() { return launched; }
void set_reversed(bool reversed) { reversed_order = reversed; }

void copy_async(void* to, const void* from, size_t bytes, bool there) {
  const size_t offset = size_t(static_cast<std::byte*>(to) - static_cast<std::byte*>(dynamic_shared()));
  if (offset + bytes > shared_size) fail_thread(cudaErrorIllegalAddress);
  if (offset % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0) fail_thread(cudaErrorMisalignedAddress);
  const Copy copy{to, there ? from : nullptr, bytes};
  if (reversed_order) copy.run();
  running->open.push_back(copy);
}
void copy_async_commit() {
  running->groups.push_back(std::move(running->open));
  running->open.clear();
}
void copy_async_wait(size_t groups) {
  for (; running->groups.size() > groups; running->groups.pop_front()) {
    for (const Copy& copy : running->groups.front()) {
      if (!reversed_order) copy.run();
      wgmma_arrived(copy.to, copy.bytes);
    }
  }
}

void fail_thread(cudaError_t why) {
  error = why;
  yield(State::kDone);
  std::abort();  // never resumed: run() drops the fibers
}

cudaError_t run(unsigned grid_x, unsigned grid_y, unsigned block, size_t shared_bytes, const std::function<void()>& kernel) {
  if (grid_x == 0 || grid_y == 0 || grid_y > 65535 || block == 0 || block > 1024 || block % 32 != 0 || shared_bytes > 227 * 1024)
    return cudaErrorInvalidConfiguration;
  ++launched;
  while (fibers.size() < block) fibers.push_back(std::make_unique<Fiber>());
  slots.resize(block / 32);
  shared_memory.resize(shared_bytes / sizeof(std::max_align_t) + 1);
  shared_size = shared_bytes;
  body = &kernel;
  error = cudaSuccess;
  current.block_dim = dim3(block, 1, 1);
  current.grid_dim = dim3(grid_x, grid_y, 1);
  for (unsigned y = 0; y < grid_y && error == cudaSuccess; ++y) {
    for (unsigned x = 0; x < grid_x && error == cudaSuccess; ++x) {
      current.block = {x, y, 0};
      memset(shared_memory.data(), 0xA5, shared_bytes);  // shared memory starts undefined
      run_cta(block);
    }
  }
  if (error != cudaSuccess) fibers.clear();  // some are in the middle of a kernel
  return error;
}

}  // namespace halfbyte::emulator
