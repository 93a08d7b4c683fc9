// Where a CUDA front runs: the device of its tensors, torch's current stream there, and errors as Python exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

namespace halfbyte::cuda {

// Makes t's device current for the scope (allocations included) and finds torch's current stream on it. Throws
// std::runtime_error when this torch has no CUDA.
class LaunchScope {
 public:
  LaunchScope(const char* op, const torch::stable::Tensor& t);
  cudaStream_t stream() const { return stream_; }

  // Throws std::runtime_error naming the op, the CUDA error and the device unless error is cudaSuccess.
  void check(cudaError_t error) const {
    if (error != cudaSuccess) [[unlikely]] fail(error);
  }

 private:
  [[noreturn]] void fail(cudaError_t error) const;

  const char* op_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// out = beta * self + alpha * a @ b, all matrices of one dtype (self also a row): aten::addmm.out of torch's CUDA library, called
// past the dispatcher, whose stable ABI has no Scalar. `self` may be `out`: then nothing is copied. With beta = 0 it is not read. (On
// tensors of a CPU, which host tests give it, the CPU's.)
void addmm_out(const char* op, const torch::stable::Tensor& out, const torch::stable::Tensor& self, const torch::stable::Tensor& a,
               const torch::stable::Tensor& b, double beta, double alpha);

}  // namespace halfbyte::cuda
