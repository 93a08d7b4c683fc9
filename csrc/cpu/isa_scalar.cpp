// The kernels compiled for scalar. Nothing here may include STL or torch headers: the linker would be free to keep this
// file's copy of an inline function for CPUs that cannot run it.
#include "simd/scalar.h"

#include "linear_decode_scalar.h"

#include "int8_linear_scalar.h"

namespace halfbyte::cpu {
namespace {
using Products = ProductList<Float32>;
using DirectProducts = Products;
}  // namespace
}  // namespace halfbyte::cpu

#include "kernel_table.h"

extern "C" const halfbyte::cpu::Kernels* halfbyte_kernels_scalar() { return halfbyte::cpu::kernel_table("scalar"); }
