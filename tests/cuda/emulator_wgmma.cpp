// wgmma on the CPU, from the PTX ISA's text ("Asynchronous Warpgroup Level Matrix Instructions") and CUTLASS' layouts
// (include/cute/arch/mma_sm90_desc.hpp, include/cute/atom/mma_traits_sm90_gmma.hpp), independently of csrc/cuda/wgmma.h.
//
// What makes a mistake show:
// - A wgmma reads A's registers and shared memory, and writes D, either when it is issued or at the wait that asks for it
//   (set_wgmma_late): a missing wait leaves sums out, registers or a slot used again too early change them.
// - It sees shared memory through the async proxy: a cp.async counts once its thread has waited for it, made a
//   fence.proxy.async, and passed a barrier, in this order. Until then, and once an ordinary store has changed them, its bytes are
//   NaN here.
// - Registers of A and D that changed since the thread's last wgmma.fence, other than by a wgmma, are an error.
// - All threads of a warpgroup must come to the same instruction with the same descriptor, which is decoded from its bits.
#include "emulator_wgmma.h"

#include <array>
#include <deque>
#include <vector>

namespace halfbyte::emulator {

namespace {

enum class Kind { kProduct, kCommit, kWait };

struct Post {
  Kind kind;
  float* d;
  unsigned columns;
  const uint32_t* a;
  uint64_t descriptor;
  float (*value)(uint16_t);
  unsigned groups;

  bool same(const Post& other) const {
    return kind == other.kind && columns == other.columns && descriptor == other.descriptor && value == other.value &&
           groups == other.groups;
  }
};
using Product = std::array<Post, kWarpgroup>;

// What a thread's last wgmma.fence saw of its registers.
struct Fenced {
  const float* d = nullptr;
  const uint32_t* a = nullptr;
  std::vector<float> d_values;
  std::vector<uint32_t> a_values;
};
struct Bytes {
  size_t offset, count;
  std::array<std::byte, 16> value;
};
struct Thread {
  Post post;
  Fenced fenced;
  std::vector<Bytes> arrived;  // since its last fence.proxy.async
};
struct Warpgroup {
  std::vector<Product> open;
  std::deque<std::vector<Product>> groups;
};

std::vector<Thread> states;
std::vector<Warpgroup> warpgroups;
std::vector<Bytes> published;  // fenced, but no barrier yet
std::vector<std::byte> view;   // dynamic shared memory as the async proxy sees it
std::byte* memory = nullptr;
bool late = false;

size_t offset_of(const void* p) { return size_t(static_cast<const std::byte*>(p) - memory); }
Thread& self() { return states[current.thread.x]; }

// Table "Matrix Descriptor": bits 0-13, 16-29, 32-45 in units of 16 bytes; 49-51; 62-63.
struct Descriptor {
  uint32_t start, leading, stride, base, mode;
  explicit Descriptor(uint64_t bits)
      : start(uint32_t(bits & 0x3FFF) << 4),
        leading(uint32_t(bits >> 16 & 0x3FFF) << 4),
        stride(uint32_t(bits >> 32 & 0x3FFF) << 4),
        base(uint32_t(bits >> 49 & 7)),
        mode(uint32_t(bits >> 62)) {}
};

bool operand(const Post& post, std::vector<float>& b) {
  if (Descriptor(post.descriptor).base != 0) return false;  // a pattern that starts between its multiples: used by nothing here
  for (unsigned n = 0; n < post.columns; ++n) {
    for (unsigned k = 0; k < 16; ++k) {
      const uint32_t address = wgmma_address(post.descriptor, n, k);
      if (address < kDynamicStart || address - kDynamicStart + 2 > view.size()) return false;
      const size_t offset = address - kDynamicStart;
      uint16_t bits = 0xFFFF;
      if (memcmp(view.data() + offset, memory + offset, 2) == 0) memcpy(&bits, memory + offset, 2);
      b[n * 16 + k] = post.value(bits);
    }
  }
  return true;
}

// Products in fp32 exactly, added in fp32 in the order of k (the hardware's order is not documented).
bool multiply(const Product& product, unsigned first) {
  std::vector<float> b(product[0].columns * 16);
  if (!operand(product[0], b)) return false;
  float a[64][16];
  for (unsigned t = 0; t < kWarpgroup; ++t) {  // ALayout_64x16: ((4,8,4),(2,2,2)) : ((128,1,16),(64,8,512)), column-major
    for (unsigned v = 0; v < 8; ++v) {
      const unsigned at = t % 4 * 128 + t / 4 % 8 + t / 32 * 16 + v % 2 * 64 + v / 2 % 2 * 8 + v / 4 * 512;
      a[at % 64][at / 64] = product[t].value(uint16_t(product[t].a[v / 2] >> (16 * (v % 2))));
    }
  }
  for (unsigned t = 0; t < kWarpgroup; ++t) {
    for (unsigned v = 0; v < product[t].columns / 2; ++v) {  // CLayout_64xN: ((4,8,4),(2,2,N/8)) : ((128,1,16),(64,8,512))
      const unsigned at = t % 4 * 128 + t / 4 % 8 + t / 32 * 16 + v % 2 * 64 + v / 2 % 2 * 8 + v / 4 * 512;
      const float *row = a[at % 64], *column = &b[at / 64 * 16];
      float sum = product[t].d[v];
      for (unsigned k = 0; k < 16; ++k) sum += row[k] * column[k];
      product[t].d[v] = sum;
    }
    Fenced& fenced = states[first + t].fenced;
    if (fenced.d == product[t].d) fenced.d_values.assign(product[t].d, product[t].d + fenced.d_values.size());
  }
  return true;
}

void post(const Post& mine) {
  self().post = mine;
  syncwarpgroup();
}

}  // namespace

void set_wgmma_late(bool on) { late = on; }

uint32_t wgmma_address(uint64_t descriptor, unsigned n, unsigned k) {
  const Descriptor d(descriptor);
  const uint32_t bits = d.mode == 0 ? 0 : 4 - d.mode;  // 128-byte swizzle: 3, 64: 2, 32: 1
  // Canonical K-major layouts, T = 8 values of 16 bits: ((8,m),(T,2)) : ((T,SBO),(1,LBO)), or swizzled ((width,SBO),(1,T)).
  const uint32_t across = d.mode == 0 ? d.leading : 16, row = 16u << bits;
  const uint32_t linear = d.start + n % 8 * row + n / 8 * d.stride + k / 8 * across + k % 8 * 2;
  return linear ^ ((linear >> 7 & ((1u << bits) - 1)) << 4);  // Swizzle<bits, 4, 3> of the address
}

void wgmma_start(unsigned threads, void* shared, size_t bytes) {
  states.assign(threads, {});
  warpgroups.assign(threads / kWarpgroup, {});
  published.clear();
  view.assign(bytes, std::byte{0xFF});  // NaN
  memory = static_cast<std::byte*>(shared);
}

void wgmma_written(const void* to, size_t bytes) { memset(view.data() + offset_of(to), 0xFF, bytes); }

void wgmma_arrived(const void* to, size_t bytes) { self().arrived.push_back({offset_of(to), bytes, {}}); }

void fence_async_proxy() {
  for (Bytes& piece : self().arrived) {
    memcpy(piece.value.data(), memory + piece.offset, piece.count);
    published.push_back(piece);
  }
  self().arrived.clear();
}

void wgmma_barrier() {
  for (const Bytes& piece : published) memcpy(view.data() + piece.offset, piece.value.data(), piece.count);
  published.clear();
}

void wgmma_fence(const float* d, size_t registers, const uint32_t* a, size_t a_registers) {
  self().fenced = {d, a, {d, d + registers}, {a, a + a_registers}};
}

void wgmma(float* d, unsigned columns, const uint32_t* a, uint64_t descriptor, float (*value)(uint16_t)) {
  const Fenced& fenced = self().fenced;
  const bool known = fenced.d == d && a >= fenced.a && a + 4 <= fenced.a + fenced.a_values.size();
  if (!known || memcmp(d, fenced.d_values.data(), columns / 2 * 4) != 0) fail_thread(cudaErrorAssert);
  if (memcmp(a, &fenced.a_values[size_t(a - fenced.a)], 16) != 0) fail_thread(cudaErrorAssert);
  post({Kind::kProduct, d, columns, a, descriptor, value, 0});
}
void wgmma_commit() { post({Kind::kCommit, nullptr, 0, nullptr, 0, nullptr, 0}); }
void wgmma_wait(unsigned groups) { post({Kind::kWait, nullptr, 0, nullptr, 0, nullptr, groups}); }

cudaError_t wgmma_run(unsigned first) {
  Warpgroup& group = warpgroups[first / kWarpgroup];
  Product product;
  for (unsigned t = 0; t < kWarpgroup; ++t) product[t] = states[first + t].post;
  for (const Post& one : product)
    if (!one.same(product[0])) return cudaErrorInvalidValue;
  switch (product[0].kind) {
    case Kind::kProduct:
      group.open.push_back(product);
      if (!late && !multiply(product, first)) return cudaErrorIllegalAddress;
      break;
    case Kind::kCommit:
      group.groups.push_back(std::move(group.open));
      group.open.clear();
      break;
    case Kind::kWait:
      for (; group.groups.size() > product[0].groups; group.groups.pop_front()) {
        if (!late) continue;
        for (const Product& one : group.groups.front())
          if (!multiply(one, first)) return cudaErrorIllegalAddress;
      }
  }
  return cudaSuccess;
}

}  // namespace halfbyte::emulator
