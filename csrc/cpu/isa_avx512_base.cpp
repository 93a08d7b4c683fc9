// The kernels compiled for avx512_base: AVX-512 as Skylake has it (F, BW, VL, DQ). Nothing here may include STL or torch
// headers: the linker would be free to keep this file's copy of an inline function for CPUs that cannot run it.
#include "simd/avx512.h"

#include "linear_decode_avx512.h"

#include "int8_vectors_avx512.h"

#include "int8_linear_words.h"

namespace halfbyte::cpu {
namespace {
using Products = ProductList<Float32>;
using DirectProducts = Products;
}  // namespace
}  // namespace halfbyte::cpu

#include "kernel_table.h"

extern "C" const halfbyte::cpu::Kernels* halfbyte_kernels_avx512_base() { return halfbyte::cpu::kernel_table("avx512_base"); }
