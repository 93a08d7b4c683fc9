// Every quirk of LibTorch's stable ABI that the fronts need, and nowhere else (csrc/README.md explains the traps).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace halfbyte {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// MANDATORY in every kernel that calls aten: without it a raw op called with an input that requires grad records
// autograd *inside* the kernel, on buffers that are reused afterwards, and returns wrong gradients without an error.
class NoGradGuard {
 public:
  NoGradGuard() : previous_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGradGuard() { aoti_torch_grad_mode_set_enabled(previous_); }
  NoGradGuard(const NoGradGuard&) = delete;
  NoGradGuard& operator=(const NoGradGuard&) = delete;

 private:
  bool previous_;
};

// A list of tensors as the dispatcher hands it over. std::vector<Tensor> would put every handle into a std::shared_ptr: an
// allocation and two atomic counts for each of the 2688 tensors of an optimizer step over 448 parameters.
class TensorList {
 public:
  // Takes over the list that a boxed kernel finds on its stack, and the tensors in it.
  explicit TensorList(StableIValue list) {
    const auto handle = torch::stable::detail::to<StableListHandle>(list);
    size_t size = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size(handle, &size));
    handles_.resize(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue element;
      STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(handle, i, &element));
      handles_[i] = torch::stable::detail::to<AtenTensorHandle>(element);
    }
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_list(handle));
  }
  ~TensorList() {
    for (AtenTensorHandle handle : handles_) aoti_torch_delete_tensor_object(handle);
  }
  TensorList(TensorList&& other) : handles_(std::move(other.handles_)) { other.handles_.clear(); }
  TensorList(const TensorList&) = delete;
  TensorList& operator=(const TensorList&) = delete;

  size_t size() const { return handles_.size(); }
  bool empty() const { return handles_.empty(); }
  AtenTensorHandle operator[](size_t i) const { return handles_[i]; }
  // The tensor itself, for what is asked once a call.
  Tensor tensor(size_t i) const {
    AtenTensorHandle handle;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handles_[i], &handle));
    return Tensor(handle);
  }

 private:
  std::vector<AtenTensorHandle> handles_;
};

// As TORCH_BOX, for kernels without a result, some of whose arguments are TensorLists.
template <class T>
T from_stack(StableIValue value) {
  if constexpr (std::is_same_v<T, TensorList>) return TensorList(value);
  else return torch::stable::detail::to<T>(value);
}
template <auto kernel>
struct Boxed;
template <class... Arguments, void (*kernel)(Arguments...)>
struct Boxed<kernel> {
  static void call(StableIValue* stack, uint64_t, uint64_t) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      std::tuple<std::remove_cvref_t<Arguments>...> arguments{from_stack<std::remove_cvref_t<Arguments>>(stack[I])...};
      std::apply(kernel, arguments);
    }(std::index_sequence_for<Arguments...>());
  }
};

// The kernel of an op and of its overload `eager` (def_both of library.cpp).
inline void impl_both(torch::stable::detail::StableLibrary& m, const std::string& name,
                      void (*kernel)(StableIValue*, uint64_t, uint64_t)) {
  m.impl(name.c_str(), kernel);
  m.impl((name + ".eager").c_str(), kernel);
}

// t, or a contiguous copy. torch's own goes through the dispatcher even where there is nothing to do (1 us).
inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// t, or its values as `dtype`: likewise.
inline Tensor as_dtype(const Tensor& t, ScalarType dtype) { return t.scalar_type() == dtype ? t : torch::stable::to(t, dtype); }

// A matrix in t's memory, from its element `first` on. narrow, view and transpose through the dispatcher take microseconds each.
inline Tensor matrix_at(const Tensor& t, std::array<int64_t, 2> sizes, std::array<int64_t, 2> strides, int64_t first) {
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), 2, sizes.data(), strides.data(), first, &handle));
  return Tensor(handle);
}
// (rows, columns), rows `pitch` apart.
inline Tensor matrix_in(const Tensor& t, int64_t rows, int64_t columns, int64_t pitch, int64_t first = 0) {
  return matrix_at(t, {rows, columns}, {pitch, 1}, first);
}
inline Tensor transposed(const Tensor& matrix) {
  return matrix_at(matrix, {matrix.size(1), matrix.size(0)}, {matrix.stride(1), matrix.stride(0)}, 0);
}

// Sizes of `t` with the last dimension replaced.
inline std::vector<int64_t> with_last_size(const Tensor& t, int64_t last) {
  std::vector<int64_t> sizes(t.sizes().begin(), t.sizes().end());
  sizes.back() = last;
  return sizes;
}

// Uninitialized contiguous memory on the device of `like`. torch::stable::new_empty goes through the dispatcher by the op's
// name: 1.3 us against 0.3 (benchmarks/bench_overhead.py, a Zen 4 core).
inline Tensor new_tensor(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::array<int64_t, 16> strides;
  if (sizes.size() > strides.size()) return torch::stable::new_empty(like, sizes, dtype);
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d] > 1 ? sizes[d] : 1) strides[d] = stride;
  int32_t device_type, device_index;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(), code, device_type,
                                                         device_index, &handle));
  return Tensor(handle);
}

// Product of all dimensions but the last; right also when the last one is 0.
inline int64_t leading_numel(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) rows *= t.size(i);
  return rows;
}

// parallel_for that carries an exception out with its type and text: torch's own loses both at this ABI target.
template <class Body>
void parallel_rows(int64_t rows, int64_t grain, const Body& body) {
  if (rows <= 0) return;
  std::exception_ptr error;
  std::mutex error_mutex;
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    try {
      body(begin, end);
    } catch (...) {
      std::lock_guard<std::mutex> lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

// parallel_rows over several matrices, (rows[i], columns[i]) each: body(i, begin, end) for ranges of rows. A thread gets `grain`
// elements at least, of one matrix or of many small ones.
template <class Body>
void parallel_lists(const std::vector<int64_t>& rows, const std::vector<int64_t>& columns, int64_t grain, const Body& body) {
  std::vector<int64_t> first{0};  // elements of the matrices before each
  for (size_t i = 0; i < rows.size(); ++i) first.push_back(first.back() + rows[i] * columns[i]);
  parallel_rows(first.back(), grain, [&](int64_t begin, int64_t end) {
    size_t i = size_t(std::upper_bound(first.begin(), first.end(), begin) - first.begin()) - 1;
    for (; i < rows.size() && first[i] < end; ++i) {
      // A row is done by who has its first element.
      const auto row_at = [&](int64_t element) {
        return (std::clamp(element, first[i], first[i + 1]) - first[i] + columns[i] - 1) / columns[i];
      };
      if (row_at(begin) < row_at(end)) body(i, row_at(begin), row_at(end));
    }
  });
}

// aten::linear(input, weight, bias), without recording autograd.
inline Tensor aten_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  NoGradGuard no_grad;
  std::array<StableIValue, 3> stack{torch::stable::detail::from(input), torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// aten::matmul(a, b), without recording autograd.
inline Tensor aten_matmul(const Tensor& a, const Tensor& b) {
  NoGradGuard no_grad;
  std::array<StableIValue, 2> stack{torch::stable::detail::from(a), torch::stable::detail::from(b)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::matmul", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// aten::_int_mm(a, b): int8 x int8 -> int32.
inline Tensor aten_int_mm(const Tensor& a, const Tensor& b) {
  NoGradGuard no_grad;
  std::array<StableIValue, 2> stack{torch::stable::detail::from(a), torch::stable::detail::from(b)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_int_mm", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// aten::_scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=dtype): e4m3 (M, K) row-major x (K, N) column-major, scales (M, 1) and
// (1, N). Not use_fast_accum: partial sums are promoted to float32, instead of 14 bits over the whole of K.
inline Tensor aten_scaled_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                             const std::optional<Tensor>& bias, ScalarType dtype) {
  NoGradGuard no_grad;
  std::array<StableIValue, 8> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                    torch::stable::detail::from(scale_a), torch::stable::detail::from(scale_b),
                                    torch::stable::detail::from(bias), torch::stable::detail::from(std::nullopt),
                                    torch::stable::detail::from(std::optional<ScalarType>(dtype)), torch::stable::detail::from(false)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_scaled_mm", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// aten::mul(a, b), without recording autograd.
inline Tensor aten_mul(const Tensor& a, const Tensor& b) {
  NoGradGuard no_grad;
  std::array<StableIValue, 2> stack{torch::stable::detail::from(a), torch::stable::detail::from(b)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mul", "Tensor", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// aten::cat(tensors, dim), without recording autograd.
inline Tensor aten_cat(const std::vector<Tensor>& tensors, int64_t dim) {
  NoGradGuard no_grad;
  std::array<StableIValue, 2> stack{torch::stable::detail::from(tensors), torch::stable::detail::from(dim)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::cat", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace halfbyte
