// The choice of instruction set, made once per process.
#pragma once

#include "kernels.h"

namespace halfbyte::cpu {

// The best table this CPU runs, or the one HALFBYTE_CPU_ISA names (scalar, avx2, avx512, amx). Throws
// std::invalid_argument when the variable names an ISA that is unknown, not compiled in or not supported by this CPU.
const Kernels& kernels();

}  // namespace halfbyte::cpu
