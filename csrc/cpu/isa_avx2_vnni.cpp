// The kernels compiled for avx2_vnni: AVX2 with AVX-VNNI, as Intel's clients have it since Alder Lake. Nothing here may include STL or
// torch headers: the linker would be free to keep this file's copy of an inline function for CPUs that cannot run it.
#include "simd/avx2.h"

#include "linear_decode_avx2.h"

#include "linear_int16_avx2.h"

#include "int8_vectors_avx2.h"

#include "int8_linear_vnni.h"

namespace halfbyte::cpu {
namespace {
using Products = ProductList<Float32>;
using DirectProducts = ProductList<Int16, Float32>;
}  // namespace
}  // namespace halfbyte::cpu

#include "kernel_table.h"

extern "C" const halfbyte::cpu::Kernels* halfbyte_kernels_avx2_vnni() { return halfbyte::cpu::kernel_table("avx2_vnni"); }
