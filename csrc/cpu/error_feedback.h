// The entries of error_feedback in the ISA table (kernels.h).
#pragma once

#include "../error_feedback.h"
#include "../formats.h"

namespace halfbyte::cpu {

struct FeedbackKernels {
  int64_t tile_rows;  // rows worked on at once; ranges start at multiples of it only for speed

  // Floats of scratch memory for rows of K elements.
  int64_t (*scratch_floats)(int64_t in_features);

  // Rows [begin, end).
  void (*run)(const FeedbackArgs& args, const RowLayout& layout, int64_t begin, int64_t end, float* scratch);
};

}  // namespace halfbyte::cpu
