// Every schema of halfbyte. In C++, so that exported and AOT-compiled models need this library alone.
//
// Legend: packed (..., N, row_bytes) uint8 rows of `format` (ids of formats.h) with `block_size` elements per scale (0 = the
// whole row); in_features = K. Mutating ops end in `_`. Kernels are registered at the foot of cpu/<op>.cpp and cuda/<op>.cpp.
#include <string>

#include <torch/csrc/stable/library.h>

namespace {

// An op, and its overload `eager`: the same but for autograd, which does not see it (halfbyte/_library.py says why, bridge.h has
// impl_both). `signature` begins with its arguments.
void def_both(torch::stable::detail::StableLibrary& m, const std::string& name, const std::string& signature) {
  m.def((name + signature).c_str());
  m.def((name + ".eager" + signature).c_str());
}

}  // namespace

STABLE_TORCH_LIBRARY(halfbyte, m) {
  // (..., K) float -> (..., row_bytes) uint8
  m.def("quantize(Tensor input, int format, int block_size) -> Tensor");
  // the same with given absmax values: scales (..., num_blocks) float32
  m.def("quantize_with_scales(Tensor input, Tensor scales, int format, int block_size) -> Tensor");
  // quantize of several tensors of one dtype at once
  m.def("quantize_list(Tensor[] input, int format, int block_size) -> Tensor[]");
  // quantize into memory that exists: packed (..., row_bytes) uint8 contiguous <- input (..., K)
  m.def("quantize_(Tensor(a!) packed, Tensor input, int format, int block_size) -> ()");
  // quantize_ on the group's source_rank, then the rows travel by torch.distributed: all of them to every rank (broadcast), or
  // to each its rows of Shard(0) (scatter). input is None elsewhere; group_name "" is one process. Kernels: halfbyte/ops.
  m.def(
      "quantize_broadcast_(Tensor(a!) packed, Tensor? input, int format, int block_size, int source_rank, str group_name) "
      "-> ()");
  m.def(
      "quantize_scatter_(Tensor(a!) packed, Tensor? input, int format, int block_size, int source_rank, str group_name) "
      "-> ()");
  // (..., row_bytes) uint8 -> (..., K) dtype
  m.def("dequantize(Tensor packed, int format, int block_size, int in_features, ScalarType dtype) -> Tensor");
  // dequantize of several tensors at once, each with its own in_features
  m.def("dequantize_list(Tensor[] packed, int format, int block_size, int[] in_features, ScalarType dtype) -> Tensor[]");
  // (..., K) x packed (N, row_bytes) + bias (N,) -> (..., N), in input's dtype
  def_both(m, "linear", "(Tensor input, Tensor packed, Tensor? bias, int format, int block_size, int in_features) -> Tensor");
  // gradient of linear's input: (..., N) x packed (N, row_bytes) -> (..., K), in grad_output's dtype
  def_both(m, "linear_backward_input", "(Tensor grad_output, Tensor packed, int format, int block_size, int in_features) -> Tensor");
  // linear plus scaling * (input lora_A^T) lora_B^T. lora_B (N, rank); lora_A (rank, K), or one such block per group of rows
  // of packed where `splits` gives the rows of each group (several linears with one input). Also returns input lora_A^T. With a
  // mask (dropout_mask's), dropped elements of input are zeros in the branch; that what is kept is as much larger is the scaling's.
  def_both(
      m, "lora_linear",
      "(Tensor input, Tensor packed, Tensor? bias, Tensor lora_A, Tensor lora_B, float scaling, int[] splits, "
      "int format, int block_size, int in_features, Tensor? mask=None) -> (Tensor, Tensor)");
  // gradient of its input: linear_backward_input plus grad_projected (..., R) @ lora_A (R, K), in grad_output's dtype
  def_both(
      m, "lora_linear_backward_input",
      "(Tensor grad_output, Tensor packed, Tensor grad_projected, Tensor lora_A, int format, "
      "int block_size, int in_features, Tensor? mask=None) -> Tensor");
  // the gradients besides: of input lora_A^T (scaling * grad_output lora_B, plus grad_projected), and what it and lora_B's gradient make of
  // input and projected: lora_A's and lora_B's, of shape (0,) where they are not needed
  def_both(
      m, "lora_linear_backward_adapter",
      "(Tensor grad_output, Tensor input, Tensor projected, Tensor lora_B, Tensor? grad_projected, float "
      "scaling, int[] splits, bool needs_A, bool needs_B, Tensor? mask=None) -> (Tensor, Tensor, Tensor)");
  // what dropout with probability p keeps of input (..., K): a bit for each element, (..., ceil(K / 8)) uint8, the first in the lowest bit.
  // seed (1,) int64 is read on the device. The bits past column K mean nothing.
  def_both(m, "dropout_mask", "(Tensor input, Tensor seed, float p) -> Tensor");
  // linear on int8 rows with the input quantized to int8 row by row: exact int32 sums, scaled in fp32
  def_both(m, "int8_linear", "(Tensor input, Tensor packed, Tensor? bias, int in_features) -> Tensor");
  // linear on fp8 rows with the input quantized to fp8 row by row: products exact, sums in float32
  def_both(m, "fp8_linear", "(Tensor input, Tensor packed, Tensor? bias, int in_features) -> Tensor");
  // rows of packed (V, row_bytes) at indices (...) int64 or int32 -> (..., embedding_dim) dtype
  m.def("embedding(Tensor indices, Tensor packed, int format, int block_size, int embedding_dim, ScalarType dtype) -> Tensor");
  // weight (N, K) float32 -> (N, K) float32 what each element was when it was rounded, errors of earlier columns carried in
  // (factor (K, K) float32 upper triangular), and (N, num_blocks) float32 scales, given or searched: the arguments of
  // quantize_with_scales. importance (K,), candidates (C,) float32.
  m.def(
      "error_feedback(Tensor weight, Tensor? factor, Tensor importance, Tensor? scales, Tensor candidates, int format, int "
      "block_size) -> (Tensor, Tensor)");
  // instruction set of the CPU kernels in use: 0 scalar, 1 avx2, 2 avx512, 3 amx
  m.def("cpu_isa() -> int");
  // frees the scratch memory that CPU threads keep between calls; bytes kept now, over all threads
  m.def("clear_workspace() -> ()");
  m.def("workspace_bytes() -> int");
  // bytes that a call on tokens x packed (rows, row_bytes) takes of CPU memory beside its operands and its result, for plans: of the
  // scratch of one thread, at most, and of temporaries. `rank`: of a low-rank part, whose own temporaries do not count; 0: none
  m.def("linear_memory(int tokens, int rows, int format, int block_size, int in_features, ScalarType dtype) -> (int, int)");
  m.def(
      "linear_backward_memory(int tokens, int rows, int rank, int format, int block_size, int in_features, ScalarType dtype) -> (int, "
      "int)");
  m.def("int8_linear_memory(int tokens, int rows, int in_features) -> (int, int)");

  // 8-bit optimizers: one step of every parameter of the lists, in place. params, grads: contiguous float32, bfloat16 or
  // float16, mixed at will; a parameter of shape (N, ...) has K elements a row (a 1-D one is a single row). Per moment:
  // codes uint8 of the parameter's shape, scales float32 (N, ceil(K / 256)). steps: float32 counts of this step (the first
  // is 1), one for all or one each. Read on the device, so that nothing syncs and a CUDA graph may replay it: steps,
  // lr_tensor (replaces lr), grad_scale (gradients are divided by it), found_inf (not 0: nothing is written).
  // seed: rounds 16-bit parameters stochastically by (seed, step, element_offsets[i] + index in the tensor).
  m.def(
      "adamw8bit_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avg_codes, Tensor(c!)[] "
      "exp_avg_scales, Tensor(d!)[] exp_avg_sq_codes, Tensor(e!)[] exp_avg_sq_scales, Tensor[] steps, *, float lr, "
      "Tensor? lr_tensor=None, float beta1, float beta2, float eps, float weight_decay, bool maximize=False, "
      "Tensor? grad_scale=None, Tensor? found_inf=None, int[] element_offsets=[], int? seed=None) -> ()");
  m.def(
      "adam8bit_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avg_codes, Tensor(c!)[] exp_avg_scales, "
      "Tensor(d!)[] exp_avg_sq_codes, Tensor(e!)[] exp_avg_sq_scales, Tensor[] steps, *, float lr, Tensor? "
      "lr_tensor=None, float beta1, float beta2, float eps, float weight_decay, bool maximize=False, Tensor? "
      "grad_scale=None, Tensor? found_inf=None, int[] element_offsets=[], int? seed=None) -> ()");
  m.def(
      "lion8bit_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avg_codes, Tensor(c!)[] exp_avg_scales, "
      "Tensor[] steps, *, float lr, Tensor? lr_tensor=None, float beta1, float beta2, float weight_decay, bool "
      "maximize=False, Tensor? grad_scale=None, Tensor? found_inf=None, int[] element_offsets=[], int? seed=None) "
      "-> ()");
  m.def(
      "sgd8bit_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_codes, Tensor(c!)[] "
      "momentum_scales, Tensor[] steps, *, float lr, Tensor? lr_tensor=None, float momentum, float dampening, float "
      "weight_decay, bool nesterov, bool maximize=False, Tensor? grad_scale=None, Tensor? found_inf=None, int[] "
      "element_offsets=[], int? seed=None) -> ()");
}
