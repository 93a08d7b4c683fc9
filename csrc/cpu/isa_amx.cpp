// The kernels compiled for avx512 with AMX: tiles multiply bf16 pairs and int8 codes, everything else is avx512's. Nothing here
// may include STL or torch headers: the linker would be free to keep this file's copy of an inline function for CPUs that
// cannot run it.
#include "simd/avx512.h"

#include "linear_bfloat16_avx512.h"

#include "int8_vectors_avx512.h"

#include "int8_linear_vnni.h"

#include "linear_amx.h"

namespace halfbyte::cpu {
namespace {
using Products = ProductList<BFloat16Pairs, Float32>;
using DirectProducts = Products;
}  // namespace
}  // namespace halfbyte::cpu

#include "kernel_table.h"

extern "C" const halfbyte::cpu::Kernels* halfbyte_kernels_amx() { return halfbyte::cpu::kernel_table("amx"); }
