// Front of dropout_mask on the CPU.
#include "../operands.h"
#include "isa.h"

namespace halfbyte::cpu {
namespace {

Tensor dropout_mask(const Tensor& input, const Tensor& seed, double p) {
  const Tensor mask = new_tensor(input, checked_mask_sizes(input, seed, p), ScalarType::Byte);
  constexpr int64_t kGrain = 4096;  // bytes for a thread: 20 us
  const auto number = uint64_t(*static_cast<const int64_t*>(seed.const_data_ptr()));
  auto* bits = static_cast<uint8_t*>(mask.mutable_data_ptr());
  parallel_rows(mask.numel(), kGrain, [&](int64_t begin, int64_t end) {
    kernels().dropout_mask(number, dropped_of(p), begin, end, bits);
  });
  return mask;
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) { halfbyte::impl_both(m, "dropout_mask", TORCH_BOX(&halfbyte::cpu::dropout_mask)); }
