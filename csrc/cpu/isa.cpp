#include "isa.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>

#include <torch/csrc/stable/library.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// HALFBYTE_ISAS: X(name) for every isa_<name>.cpp that the build compiled, the best last. Each exports one function.
#define X(name) extern "C" const halfbyte::cpu::Kernels* halfbyte_kernels_##name();
HALFBYTE_ISAS
#undef X

namespace halfbyte::cpu {
namespace {

bool has_scalar() { return true; }

// The others ask for exactly the flags of setup.py that their isa_<name>.cpp is compiled with.
#if defined(__x86_64__)
[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
// Alder Lake and later clients.
[[maybe_unused]] bool has_avx2_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
// Skylake servers.
[[maybe_unused]] bool has_avx512_base() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
// Cascade Lake, Ice Lake; and later ones whose virtual machine hides the rest.
[[maybe_unused]] bool has_avx512_vnni() { return has_avx512_base() && __builtin_cpu_supports("avx512vnni"); }
// Zen 4, Sapphire Rapids.
[[maybe_unused]] bool has_avx512() {
  return has_avx512_vnni() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
}
// Tiles with bf16 and int8, enabled by the system, and permitted: a process must ask Linux once for the 8 KiB of state.
[[maybe_unused]] bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kTile = 1u << 24, kBFloat16 = 1u << 22, kInt8 = 1u << 25, kXSave = 1u << 27, kTileState = 3u << 17;
  unsigned a, b, c, d;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (kTile | kBFloat16 | kInt8))) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kXSave)) return false;
  asm("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return (~a & kTileState) == 0 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

struct Candidate {
  const char* name;
  bool (*supported)();
  const Kernels* (*table)();
};

#define X(name) {#name, has_##name, halfbyte_kernels_##name},
constexpr Candidate kCandidates[] = {HALFBYTE_ISAS};
#undef X

const Kernels* choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  const char* forced = std::getenv("HALFBYTE_CPU_ISA");
  const std::string wanted = forced ? forced : "";
  std::string known;
  for (auto candidate = std::rbegin(kCandidates); candidate != std::rend(kCandidates); ++candidate) {
    if (wanted.empty() ? candidate->supported() : wanted == candidate->name) {
      if (!candidate->supported())
        throw std::invalid_argument("HALFBYTE_CPU_ISA=" + wanted + ": this CPU does not have it");
      return candidate->table();
    }
    known += (known.empty() ? "" : ", ") + std::string(candidate->name);
  }
  throw std::invalid_argument("HALFBYTE_CPU_ISA=" + wanted + ": unknown, this build has " + known);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels* const table = choose();
  return *table;
}

namespace {

// The table in use, as an int because strings leak at the dispatcher: the index in halfbyte._library.CPU_ISAS.
int64_t cpu_isa() {
  constexpr const char* kNames[] = {"scalar", "avx2", "avx2_vnni", "avx512_base", "avx512_vnni", "avx512", "amx"};
  return std::find(std::begin(kNames), std::end(kNames), std::string_view(kernels().isa)) - std::begin(kNames);
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CompositeExplicitAutograd, m) { m.impl("cpu_isa", TORCH_BOX(&halfbyte::cpu::cpu_isa)); }
