// The table of CPU kernels: raw pointers only, no torch. One table per ISA, chosen once (isa.h).
// Every function works on the rows it is given; the fronts split rows over threads.
#pragma once

#include <cstdint>

#include "../formats.h"
#include "error_feedback.h"
#include "int8_linear_kernels.h"
#include "linear_kernels.h"
#include "optimizer.h"
#include "thin_kernels.h"

namespace halfbyte::cpu {

struct Kernels {
  const char* isa;

  // input (rows, K) of `dtype` -> packed (rows, row_bytes). scales (rows, num_blocks) float32 replaces the computed
  // absmax unless null.
  void (*quantize_rows)(const void* input, DType dtype, const float* scales, int64_t rows, const RowLayout& layout,
                        uint8_t* packed);

  // packed (rows, row_bytes) -> output (rows, K) of `dtype`. `stream`: the output will not be read soon, so it may
  // bypass the caches.
  void (*dequantize_rows)(const uint8_t* packed, int64_t rows, const RowLayout& layout, DType dtype, void* output,
                          bool stream);

  LinearKernels linear;
  Int8LinearKernels int8_linear;
  OptimizerKernels optimizer;
  FeedbackKernels feedback;
  ThinKernels thin;

  // Bytes [begin, end) of a mask (dropout.h); dropped_of gives `dropped`.
  void (*dropout_mask)(uint64_t seed, uint32_t dropped, int64_t begin, int64_t end, uint8_t* mask);
};

}  // namespace halfbyte::cpu
