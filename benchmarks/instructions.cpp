// Runs one CPU kernel on `rows` rows between two marks, for instruction_counts.py and predicted_cycles.py: no torch, one instruction
// set a program.
//
//   instructions                    the cases, a line each
//   instructions CASE ROWS          runs it and prints its elements (callgrind collects inside `measured`)
//   instructions CASE ROWS count    single-steps a child through it, and prints how many instructions that took as well:
//                                   for instruction sets that valgrind does not know
//   instructions CASE ROWS trace    likewise, and prints the address of each instruction, in hexadecimal, a line each
//   instructions CASE ROWS time     runs it many times, and prints the clock cycles of the fastest run as well
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "../csrc/cpu/kernels.h"

extern "C" const halfbyte::cpu::Kernels* HALFBYTE_TABLE();

using namespace halfbyte;
using namespace halfbyte::cpu;

namespace {

constexpr int64_t K = 1024;

float random_float() {
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return float(int32_t(state)) * 0x1p-31f;
}

template <class T>
T* filled(int64_t count) {
  T* data = static_cast<T*>(std::aligned_alloc(64, size_t((count * int64_t(sizeof(T)) + 4095) / 4096 * 4096 + 4096)));
  for (int64_t i = 0; i < count; ++i) {
    const float value = random_float();
    if constexpr (sizeof(T) == 4) {
      data[i] = T(value);
    } else {
      uint32_t bits;
      memcpy(&bits, &value, 4);
      data[i] = T(bits >> 16);  // bf16
    }
  }
  return data;
}

void* scratch(int64_t bytes) { return filled<float>(bytes / 4 + 16); }

// What a case prepares: the body to measure, and how many elements it works on.
struct Work {
  std::function<void()> body;
  int64_t elements;
};

const Kernels& table() { return *HALFBYTE_TABLE(); }

uint8_t* packed_rows(const RowLayout& l, int64_t rows) {
  auto* packed = static_cast<uint8_t*>(scratch(rows * l.row_bytes));
  table().quantize_rows(filled<float>(rows * K), DType::kFloat32, nullptr, rows, l, packed);
  return packed;
}

Work dequantize(int32_t format, int64_t block, int64_t rows) {
  const RowLayout l = row_layout(format, block, K);
  const uint8_t* packed = packed_rows(l, rows);
  void* out = scratch(rows * K * 2);
  return {[=] { table().dequantize_rows(packed, rows, l, DType::kBFloat16, out, false); }, rows * K};
}

Work quantize(int32_t format, int64_t block, int64_t rows) {
  const RowLayout l = row_layout(format, block, K);
  const auto* input = filled<uint16_t>(rows * K);
  auto* packed = static_cast<uint8_t*>(scratch(rows * l.row_bytes));
  return {[=] { table().quantize_rows(input, DType::kBFloat16, nullptr, rows, l, packed); }, rows * K};
}

// Instructions per weight, for all tokens together.
Work linear(int64_t tokens, Compute compute, int64_t rows) {
  const LinearKernels& k = table().linear;
  const LinearArithmetic& arithmetic = k.in(compute);
  if (tokens > arithmetic.direct_tokens && !arithmetic.any_tokens) return {[] {}, 0};
  const RowLayout l = row_layout(kNF4, 64, K);
  const uint8_t* packed = packed_rows(l, rows);
  const auto* x = filled<uint16_t>(tokens * K);
  void* units = scratch(512 * K * 4);
  const LinearOutput out{scratch(tokens * rows * 2), nullptr, rows, DType::kBFloat16};
  if (tokens <= arithmetic.direct_tokens) {
    k.prepare_direct(x, DType::kBFloat16, tokens, l, compute, units);
    return {[=, &k] { k.direct(packed, 0, rows, l, compute, units, tokens, nullptr, out); }, rows * K};
  }
  k.prepare_tiled(x, DType::kBFloat16, tokens, l, compute, 0, (tokens + k.tile_tokens - 1) / k.tile_tokens, units);
  void* panel = scratch(k.scratch_bytes);
  return {[=, &k] { k.tiled(packed, 0, rows, l, compute, units, tokens, nullptr, out, panel); }, rows * K};
}

// Rows of whole micro-kernels of turned weights, for instruction_counts.py's numbers of rows.
int64_t in_runs(int64_t rows) { return rows * 64 / 24; }

// What many tokens take: weights turned. fp32 in and out.
Work linear_turned(int64_t tokens, Compute compute, int64_t rows) {
  const LinearKernels& k = table().linear;
  if (!k.in(compute).turned_rows) return {[] {}, 0};
  const RowLayout l = row_layout(kNF4, 64, K);
  const uint8_t* packed = packed_rows(l, rows);
  void* units = scratch(tokens * K * 4);
  k.prepare_matrix(filled<float>(tokens * K), DType::kFloat32, tokens, K, compute, 0, tokens, units);
  const LinearOutput out{scratch(tokens * rows * 4), nullptr, rows, DType::kFloat32};
  void* panel = scratch(k.turned_scratch(compute, tokens, rows, K));
  return {[=, &k] { k.turned(packed, 0, rows, l, compute, {units, false}, tokens, nullptr, out, panel); }, rows * K};
}

Work linear_backward(int64_t tokens, Compute compute, int64_t rows) {
  const LinearKernels& k = table().linear;
  if (!k.in(compute).any_tokens) return {[] {}, 0};
  const RowLayout l = row_layout(kNF4, 64, K);
  const uint8_t* packed = packed_rows(l, rows);
  const int64_t groups = K / k.group;
  if (tokens <= kPassTokens) {
    const auto* grad = filled<uint16_t>(tokens * rows);
    auto* sums = static_cast<float*>(scratch(tokens * K * 4));
    return {[=, &k] { k.backward_direct(packed, rows, 0, groups, l, compute, grad, DType::kBFloat16, rows, tokens, sums, K); }, rows * K};
  }
  void* units = scratch((tokens + 16) * (rows + 64) * 4);
  k.prepare_matrix(filled<float>(tokens * rows), DType::kFloat32, tokens, rows, compute, 0, tokens, units);
  const LinearOutput out{scratch(tokens * K * 4), nullptr, K, DType::kFloat32};
  void* panel = scratch(k.backward_scratch(compute, tokens, rows, groups, 0));
  return {[=, &k] { k.backward(packed, rows, 0, groups, l, compute, {units, false}, tokens, nullptr, out, panel); }, rows * K};
}

Work int8_linear(int64_t tokens, int64_t rows) {
  const Int8LinearKernels& k = table().int8_linear;
  const RowLayout l = row_layout(kInt8, 0, K);
  const uint8_t *packed = packed_rows(l, rows), *x = packed_rows(l, tokens + 1);  // prepare_tiled reads past the last one
  void* units = scratch(512 * K * 4);
  auto* factors = filled<float>(tokens);
  const LinearOutput out{scratch(tokens * rows * 2), nullptr, rows, DType::kBFloat16};
  if (tokens <= k.direct_tokens) {
    auto* sums = static_cast<int32_t*>(scratch(4 * tokens));
    k.prepare_direct(x, tokens, l, units, sums, factors);
    return {[=, &k] { k.direct(packed, 0, rows, l, units, sums, factors, tokens, {0, 1}, out); }, rows * K};
  }
  for (int64_t m = 0; m < tokens; m += table().linear.lanes) k.prepare_tiled(x + m * l.row_bytes, m, tokens, l, units, factors);
  void* panel = scratch(table().linear.scratch_bytes);
  return {[=, &k] { k.tiled(packed, 0, rows, l, units, factors, tokens, out, panel); }, rows * K};
}

enum class Parameters { kFloat32, kBFloat16, kStochastic };

Work optimizer(OptimizerRule rule, int64_t length, int64_t rows, Parameters parameters = Parameters::kFloat32) {
  OptimizerTensor t{};
  const int64_t numel = rows * K;
  if (parameters == Parameters::kFloat32) {
    t.param = filled<float>(numel), t.grad = filled<float>(numel);
  } else {
    t.param = filled<uint16_t>(numel), t.grad = filled<uint16_t>(numel);
    t.param_dtype = t.grad_dtype = DType::kBFloat16;
  }
  t.row_length = length, t.blocks_per_row = (length + kStateBlock - 1) / kStateBlock;
  const int64_t blocks = numel / length * t.blocks_per_row;
  for (int m = 0; m < 2; ++m) {
    t.codes[m] = static_cast<uint8_t*>(scratch(numel));
    t.scales[m] = filled<float>(blocks);
    memset(t.codes[m], m ? 0 : 127, size_t(numel));
    for (int64_t b = 0; b < blocks; ++b) t.scales[m][b] = 0.0f;
  }
  OptimizerHyper h{};
  h.lr = 1e-3, h.beta1 = 0.9, h.beta2 = 0.999, h.eps = 1e-8, h.weight_decay = 0.01, h.momentum = 0.9;
  h.stochastic = parameters == Parameters::kStochastic;
  const OptimizerScalars s = optimizer_scalars(rule, h, h.lr, 1.0, 2);
  table().optimizer.update(rule, t, s, 0, blocks);  // so that the moments are not all zero
  return {[=] { table().optimizer.update(rule, t, s, 0, blocks); }, numel};
}

const std::map<std::string, std::function<Work(int64_t)>> kCases = {
    {"dequantize nf4 to bf16", [](int64_t rows) { return dequantize(kNF4, 64, rows); }},
    {"dequantize int8 to bf16", [](int64_t rows) { return dequantize(kInt8, 0, rows); }},
    {"quantize bf16 to nf4", [](int64_t rows) { return quantize(kNF4, 64, rows); }},
    {"quantize bf16 to int8", [](int64_t rows) { return quantize(kInt8, 0, rows); }},
    {"linear nf4 M=1 in fp32", [](int64_t rows) { return linear(1, Compute::kFloat32, rows); }},
    {"linear nf4 M=1 in int16", [](int64_t rows) { return linear(1, Compute::kInt16, rows); }},
    {"linear nf4 M=1 in bf16", [](int64_t rows) { return linear(1, Compute::kBFloat16, rows); }},
    {"linear nf4 M=64 in fp32", [](int64_t rows) { return linear(64, Compute::kFloat32, rows); }},
    {"linear nf4 M=64 in bf16", [](int64_t rows) { return linear(64, Compute::kBFloat16, rows); }},
    {"linear nf4 M=64 turned in fp32", [](int64_t rows) { return linear_turned(64, Compute::kFloat32, in_runs(rows)); }},
    {"linear nf4 M=64 turned in bf16", [](int64_t rows) { return linear_turned(64, Compute::kBFloat16, in_runs(rows)); }},
    {"linear_backward nf4 M=1 in fp32", [](int64_t rows) { return linear_backward(1, Compute::kFloat32, rows); }},
    {"linear_backward nf4 M=1 in bf16", [](int64_t rows) { return linear_backward(1, Compute::kBFloat16, rows); }},
    {"linear_backward nf4 M=64 in fp32", [](int64_t rows) { return linear_backward(64, Compute::kFloat32, in_runs(rows)); }},
    {"linear_backward nf4 M=64 in bf16", [](int64_t rows) { return linear_backward(64, Compute::kBFloat16, in_runs(rows)); }},
    {"int8_linear M=1", [](int64_t rows) { return int8_linear(1, rows); }},
    {"int8_linear M=64", [](int64_t rows) { return int8_linear(64, rows); }},
    {"adamw8bit fp32, wide rows", [](int64_t rows) { return optimizer(OptimizerRule::kAdamW, K, rows); }},
    {"adamw8bit fp32, rows of 16", [](int64_t rows) { return optimizer(OptimizerRule::kAdamW, 16, rows); }},
    {"adamw8bit bf16, wide rows", [](int64_t rows) { return optimizer(OptimizerRule::kAdamW, K, rows, Parameters::kBFloat16); }},
    {"adamw8bit bf16, stochastic", [](int64_t rows) { return optimizer(OptimizerRule::kAdamW, K, rows, Parameters::kStochastic); }},
    {"lion8bit fp32, wide rows", [](int64_t rows) { return optimizer(OptimizerRule::kLion, K, rows); }},
    {"sgd8bit fp32, wide rows", [](int64_t rows) { return optimizer(OptimizerRule::kSGD, K, rows); }},
};

// Steps a child through body; stepped(child) comes after each instruction. Returns how many, -1: it cannot.
int64_t single_step(const std::function<void()>& body, const std::function<void(pid_t)>& stepped) {
  const pid_t child = fork();
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    raise(SIGSTOP);
    body();
    raise(SIGUSR1);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  int64_t steps = 0;
  for (;; ++steps, stepped(child)) {
    if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0) return -1;
    waitpid(child, &status, 0);
    if (!WIFSTOPPED(status) || WSTOPSIG(status) == SIGUSR1) break;
    if (WSTOPSIG(status) != SIGTRAP) return -1;
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return steps;
}

void print_address(pid_t child) {
  user_regs_struct registers;
  if (ptrace(PTRACE_GETREGS, child, nullptr, &registers) == 0) std::printf("%llx\n", registers.rip);
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// A chain of additions, each of which waits a cycle for the one before.
double seconds_of_a_cycle() {
  constexpr int64_t kTurns = 100000;
  const double start = seconds();
  for (int64_t i = 0, x = 0; i < kTurns; ++i)
    asm volatile("add $1, %0; add $1, %0; add $1, %0; add $1, %0; add $1, %0; add $1, %0; add $1, %0; add $1, %0" : "+r"(x));
  return (seconds() - start) / double(8 * kTurns);
}

// Clock cycles of the fastest of many runs, at the clock's fastest beside them.
double cycles(const std::function<void()>& body) {
  double least = 1e300, of_a_cycle = 1e300;
  for (int i = 0; i < 200; ++i) {
    const double start = seconds();
    body();
    const double taken = seconds() - start, cycle = seconds_of_a_cycle();
    if (taken < least) least = taken;
    if (cycle < of_a_cycle) of_a_cycle = cycle;
  }
  return least / of_a_cycle;
}

}  // namespace

extern "C" [[gnu::noinline]] void measured(const std::function<void()>* body) { (*body)(); }

int main(int argc, char** argv) {
  if (argc == 1) {
    for (const auto& [name, make] : kCases) std::printf("%s\n", name.c_str());
    return 0;
  }
  const Work work = kCases.at(argv[1])(std::atol(argv[2]));
  const std::string mode = argc > 3 ? argv[3] : "";
  std::printf("%ld", long(work.elements));
  if (!work.elements) return std::puts(""), 0;
  int64_t steps = 0;
  if (mode == "count") std::printf(" %ld", long(steps = single_step(work.body, [](pid_t) {})));
  else if (mode == "time") std::printf(" %.0f", cycles(work.body));
  else if (mode.empty()) measured(&work.body);
  std::puts("");
  if (mode == "trace") steps = single_step(work.body, print_address);
  return steps < 0;
}
