#include "stream.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace halfbyte::cuda {
namespace {

using CurrentStream = AOTITorchError (*)(int32_t device, void** stream);

// libtorch_cuda is found among the libraries torch has loaded, never linked: this library also loads on a CPU-only torch.
CurrentStream find_current_stream() {
  void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  return library ? reinterpret_cast<CurrentStream>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
}

CurrentStream current_stream() {
  static const CurrentStream found = find_current_stream();
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

void LaunchScope::fail(cudaError_t error) const {
  (void)cudaGetLastError();
  std::string text = prefix(op_) + "CUDA error " + std::to_string(int(error)) + " (" + cudaGetErrorName(error) +
                     "): " + cudaGetErrorString(error) + ", on cuda:" + std::to_string(device_);
  if (error == cudaErrorNoKernelImageForDevice) text += "; rebuild halfbyte with TORCH_CUDA_ARCH_LIST set to this GPU's architecture";
  throw std::runtime_error(text);
}

}  // namespace halfbyte::cuda
