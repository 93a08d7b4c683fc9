#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include <torch/csrc/stable/library.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(HALFBYTE_HAVE_ISA_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// One exported function per isa_<name>.cpp; HALFBYTE_HAVE_ISA_* is set by the build for each file it compiled.
extern "C" const halfbyte::cpu::Kernels* halfbyte_kernels_scalar();
#if defined(HALFBYTE_HAVE_ISA_AVX2)
extern "C" const halfbyte::cpu::Kernels* halfbyte_kernels_avx2();
#endif
#if defined(HALFBYTE_HAVE_ISA_AVX512)
extern "C" const halfbyte::cpu::Kernels* halfbyte_kernels_avx512();
#endif
#if defined(HALFBYTE_HAVE_ISA_AMX)
extern "C" const halfbyte::cpu::Kernels* halfbyte_kernels_amx();
#endif

namespace halfbyte::cpu {
namespace {

struct Candidate {
  const char* name;
  bool (*supported)();
  const Kernels* (*table)();
};

#if defined(HALFBYTE_HAVE_ISA_AVX2)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif
#if defined(HALFBYTE_HAVE_ISA_AVX512)
// Ice Lake and Zen 4 onward, with bf16: exactly the flags isa_avx512.cpp is compiled with.
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
}
#endif

#if defined(HALFBYTE_HAVE_ISA_AMX)
// Tiles with bf16 and int8, enabled by the system, and permitted: a process must ask Linux once for the 8 KiB of state.
bool has_amx() {
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

// Best first.
const Candidate kCandidates[] = {
#if defined(HALFBYTE_HAVE_ISA_AMX)
    {"amx", has_amx, halfbyte_kernels_amx},
#endif
#if defined(HALFBYTE_HAVE_ISA_AVX512)
    {"avx512", has_avx512, halfbyte_kernels_avx512},
#endif
#if defined(HALFBYTE_HAVE_ISA_AVX2)
    {"avx2", has_avx2, halfbyte_kernels_avx2},
#endif
    {"scalar", [] { return true; }, halfbyte_kernels_scalar},
};

const Kernels* choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  const char* forced = std::getenv("HALFBYTE_CPU_ISA");
  const std::string wanted = forced ? forced : "";
  std::string known;
  for (const Candidate& candidate : kCandidates) {
    if (wanted.empty() ? candidate.supported() : wanted == candidate.name) {
      if (!candidate.supported())
        throw std::invalid_argument("HALFBYTE_CPU_ISA=" + wanted + ": this CPU does not have it");
      return candidate.table();
    }
    known += (known.empty() ? "" : ", ") + std::string(candidate.name);
  }
  throw std::invalid_argument("HALFBYTE_CPU_ISA=" + wanted + ": unknown, this build has " + known);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels* const table = choose();
  return *table;
}

namespace {

// The table in use, as an int because strings leak at the dispatcher: 0 scalar, 1 avx2, 2 avx512, 3 amx.
int64_t cpu_isa() {
  const std::string name = kernels().isa;
  return name == "amx" ? 3 : name == "avx512" ? 2 : name == "avx2" ? 1 : 0;
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CompositeExplicitAutograd, m) { m.impl("cpu_isa", TORCH_BOX(&halfbyte::cpu::cpu_isa)); }
