#include "stream.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <stdexcept>
#include <string>

#include "../bridge.h"

namespace halfbyte::cuda {
namespace {

using CurrentStream = AOTITorchError (*)(int32_t device, void** stream);
using AddmmOut = AOTITorchError (*)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle a, AtenTensorHandle b, double beta,
                                    double alpha);

// A function of libtorch_cuda, or null: it is found among the libraries torch has loaded, never linked, so that this library also
// loads on a CPU-only torch.
template <class Function>
Function find(const char* name) {
  void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  return library ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
}

CurrentStream current_stream() {
  static const auto found = find<CurrentStream>("aoti_torch_get_current_cuda_stream");
  return found;
}

std::string prefix(const char* op) { return std::string("halfbyte::") + op + ": "; }

// Before anything else: without CUDA in torch even the device guard would fail, with a text that helps nobody.
int32_t checked_device(const char* op, const torch::stable::Tensor& t) {
  if (!current_stream()) throw std::runtime_error(prefix(op) + "this torch has no CUDA support (libtorch_cuda.so is not loaded)");
  return t.get_device_index();
}

}  // namespace

LaunchScope::LaunchScope(const char* op, const torch::stable::Tensor& t)
    : op_(op), device_(checked_device(op, t)), guard_(device_) {
  void* stream = nullptr;
  if (current_stream()(device_, &stream) != 0)
    throw std::runtime_error(prefix(op) + "could not get the current CUDA stream of cuda:" + std::to_string(device_));
  stream_ = static_cast<cudaStream_t>(stream);
  // The guard set the device in torch's runtime; this library has its own (static cudart) with its own idea of the current
  // device. Both then name the same primary context, so torch's guard also restores it.
  check(cudaSetDevice(device_));
}

void addmm_out(const char* op, const torch::stable::Tensor& out, const torch::stable::Tensor& self, const torch::stable::Tensor& a,
               const torch::stable::Tensor& b, double beta, double alpha) {
  static const auto of_cuda = find<AddmmOut>("aoti_torch_cuda_addmm_out");
  const AddmmOut call = out.is_cpu() ? &aoti_torch_cpu_addmm_out : of_cuda;
  if (!call) throw std::runtime_error(prefix(op) + "this torch has no CUDA support (libtorch_cuda.so is not loaded)");
  const NoGradGuard no_grad;
  if (call(out.get(), self.get(), a.get(), b.get(), beta, alpha) != 0)
    throw std::runtime_error(prefix(op) + "aten::addmm failed; torch has printed why");
}

void LaunchScope::fail(cudaError_t error) const {
  (void)cudaGetLastError();
  std::string text = prefix(op_) + "CUDA error " + std::to_string(int(error)) + " (" + cudaGetErrorName(error) +
                     "): " + cudaGetErrorString(error) + ", on cuda:" + std::to_string(device_);
  if (error == cudaErrorNoKernelImageForDevice) text += "; rebuild halfbyte with TORCH_CUDA_ARCH_LIST set to this GPU's architecture";
  throw std::runtime_error(text);
}

}  // namespace halfbyte::cuda
