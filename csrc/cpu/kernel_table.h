// Included once per ISA file, after simd/<isa>.h: collects the kernels of this ISA into one table.
#pragma once

#include "dequantize_kernel.h"
#include "error_feedback_kernel.h"
#include "int8_linear_kernel.h"
#include "kernels.h"
#include "linear_table.h"
#include "optimizer_kernel.h"
#include "quantize_kernel.h"
#include "thin_kernel.h"

namespace halfbyte::cpu {
namespace {

const Kernels* kernel_table(const char* isa) {
  static Kernels table;
  table.isa = isa;
  table.quantize_rows = quantize_rows;
  table.dequantize_rows = dequantize_rows;
  table.linear = linear_kernels();
  table.int8_linear = int8_linear_kernels();
  table.optimizer = optimizer::kernels();
  table.feedback = feedback::kernels();
  table.thin = thin::kernels();
  table.dropout_mask = dropout_mask;
  return &table;
}

}  // namespace
}  // namespace halfbyte::cpu
