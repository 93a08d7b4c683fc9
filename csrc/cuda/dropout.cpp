// Front of dropout_mask on CUDA. The seed is read on the device: nothing waits, and a graph may be replayed with another one.
#include "../operands.h"
#include "kernels.h"
#include "stream.h"

namespace halfbyte::cuda {
namespace {

Tensor dropout_mask(const Tensor& input, const Tensor& seed, double p) {
  const std::vector<int64_t> sizes = checked_mask_sizes(input, seed, p);
  const LaunchScope scope("dropout_mask", input);
  const Tensor mask = new_tensor(input, sizes, ScalarType::Byte);
  scope.check(launch_dropout_mask(static_cast<const int64_t*>(seed.const_data_ptr()), dropped_of(p), mask.numel(),
                                  static_cast<uint8_t*>(mask.mutable_data_ptr()), scope.stream()));
  return mask;
}

}  // namespace
}  // namespace halfbyte::cuda

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CUDA, m) { halfbyte::impl_both(m, "dropout_mask", TORCH_BOX(&halfbyte::cuda::dropout_mask)); }
