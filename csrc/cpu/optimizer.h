// The optimizer's entries of the ISA table (kernels.h).
#pragma once

#include "../optimizer.h"

namespace halfbyte::cpu {

struct OptimizerKernels {
  // Updates blocks [begin, end) of one tensor, numbered along its rows. Subnormal numbers count as zero: the caller has
  // switched them off for this thread (FlushSubnormals).
  void (*update)(OptimizerRule rule, const OptimizerTensor& tensor, const OptimizerScalars& scalars, int64_t begin,
                 int64_t end);
};

}  // namespace halfbyte::cpu
