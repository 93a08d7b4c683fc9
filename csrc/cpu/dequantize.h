// dequantize for the other fronts of this folder, after all checks.
#pragma once

#include "../bridge.h"
#include "../checks.h"

namespace halfbyte::cpu {

// packed (rows, row_bytes) contiguous -> output (rows, K) contiguous, split over threads.
void dequantize_into(const uint8_t* packed, int64_t rows, const RowLayout& layout, DType dtype, void* output, bool stream);

}  // namespace halfbyte::cpu
