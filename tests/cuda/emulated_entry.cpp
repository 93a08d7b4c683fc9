// C entry points of the emulated kernels, called by tests/cuda/emulated.py through ctypes.
#include "emulator.h"

#include <vector>

#include "../../csrc/cuda/elements.h"
#include "../../csrc/cuda/fp8_linear_route.h"
#include "../../csrc/cuda/geometry.h"
#include "../../csrc/cuda/int8_linear_route.h"
#include "../../csrc/cuda/kernels.h"
#include "../../csrc/cuda/linear_route.h"
#include "../../csrc/cuda/optimizer_elements.h"
#include "../../csrc/cuda/optimizer_table.h"
#include "../../csrc/cuda/wgmma.h"

using namespace halfbyte;

#pragma GCC visibility push(default)
extern "C" {

void emulated_set_reversed(int reversed) { emulator::set_reversed(reversed != 0); }
void emulated_set_wgmma_late(int late) { emulator::set_wgmma_late(late != 0); }

// What wgmma.h makes of an address, and where the emulator then finds element (n, k).
uint64_t swizzled_descriptor_of(uint32_t address) { return cuda::swizzled_descriptor(address); }
uint32_t wgmma_address_of(uint64_t descriptor, int n, int k) { return emulator::wgmma_address(descriptor, unsigned(n), unsigned(k)); }

int emulated_dequantize(const uint8_t* packed, int64_t rows, int format, int64_t block_size, int64_t in_features, int dtype,
                        void* output) {
  return cuda::launch_dequantize(packed, rows, row_layout(format, block_size, in_features), DType(dtype), output, nullptr);
}

// Tensors of one format, each with its own rows and in_features; returns the CUDA error, or minus the number of launches.
int emulated_dequantize_list(int64_t count, const uint8_t* const* packed, const int64_t* rows, const int64_t* in_features,
                             int64_t format, int64_t block_size, int64_t dtype, void* const* outputs) {
  std::vector<cuda::DequantizeTensor> tensors;
  for (int64_t i = 0; i < count; ++i)
    tensors.push_back({packed[i], rows[i], row_layout(int(format), block_size, in_features[i]), outputs[i]});
  const int before = emulator::launches();
  const cudaError_t error = cuda::launch_dequantize(tensors.data(), tensors.size(), DType(dtype), nullptr);
  return error == cudaSuccess ? before - emulator::launches() : int(error);
}

int emulated_embedding(const void* indices, int wide, int64_t count, const uint8_t* packed, int64_t num_embeddings, int format,
                       int64_t block_size, int64_t dim, int dtype, void* output) {
  return cuda::launch_embedding(indices, wide != 0, count, packed, num_embeddings, row_layout(format, block_size, dim),
                                DType(dtype), output, nullptr);
}

int emulated_quantize(const void* input, int dtype, const float* scales, int64_t rows, int format, int64_t block_size,
                      int64_t in_features, uint8_t* packed) {
  return cuda::launch_quantize(input, DType(dtype), scales, rows, row_layout(format, block_size, in_features), packed, nullptr);
}

int emulated_quantize_list(int64_t count, const void* const* inputs, const int64_t* rows, const int64_t* in_features,
                           int64_t format, int64_t block_size, int64_t dtype, uint8_t* const* packed) {
  std::vector<cuda::QuantizeTensor> tensors;
  for (int64_t i = 0; i < count; ++i)
    tensors.push_back({inputs[i], nullptr, rows[i], row_layout(int(format), block_size, in_features[i]), packed[i]});
  const int before = emulator::launches();
  const cudaError_t error = cuda::launch_quantize(tensors.data(), tensors.size(), DType(dtype), nullptr);
  return error == cudaSuccess ? before - emulator::launches() : int(error);
}

int emulated_dropout_mask(const int64_t* seed, int64_t dropped, int64_t bytes, uint8_t* mask) {
  return cuda::launch_dropout_mask(seed, uint32_t(dropped), bytes, mask, nullptr);
}

int emulated_keep(const void* input, int64_t dtype, int64_t rows, int64_t columns, const uint8_t* mask, void* output) {
  return cuda::launch_keep(input, DType(dtype), rows, columns, mask, output, nullptr);
}

int emulated_error_feedback(const float* weight, const float* factor, const float* importance, const float* scales,
                            const float* candidates, int64_t num_candidates, int64_t rows, int format, int64_t block_size,
                            int64_t in_features, float* targets, float* chosen) {
  const FeedbackArgs args{weight, factor, importance, scales, candidates, num_candidates, targets, chosen};
  return cuda::launch_error_feedback(args, rows, row_layout(format, block_size, in_features), nullptr);
}

// kernel: 0 linear_small, 1 linear_tiled, 2 linear_backward, 3 linear_wgmma, 4 linear_backward_wgmma.
int emulated_packed_product(int64_t kernel, const void* input, int64_t M, const uint8_t* packed, int64_t N, int64_t format,
                            int64_t block_size, int64_t in_features, int64_t dtype, const void* addend, int64_t addend_stride,
                            void* output, float* partial, int64_t splits) {
  const cuda::PackedProduct product{input, packed, M, N, row_layout(int(format), block_size, in_features), DType(dtype),
                                    addend, addend_stride, output, splits > 1 ? partial : nullptr, splits};
  constexpr decltype(&cuda::launch_linear_small) kKernels[] = {cuda::launch_linear_small, cuda::launch_linear_tiled,
                                                               cuda::launch_linear_backward, cuda::launch_linear_wgmma,
                                                               cuda::launch_linear_backward_wgmma};
  return kKernels[kernel](product, nullptr);
}

// d += a @ b, 16 x 16, row-major: lane 16 i + r reads row r of b's columns 8 i .. 8 i + 7.
int emulated_row_major_product(const __nv_bfloat16* a, const __nv_bfloat16* b, float* d) {
  return emulator::run(1, 1, 32, 512, [=] {
    const unsigned lane = threadIdx.x, g = lane / 4, t = lane % 4;
    __nv_bfloat16* const shared = cuda::dynamic_shared<__nv_bfloat16>();
    for (unsigned i = lane; i < 256; i += 32) shared[i] = b[i];
    emulator::syncthreads();
    uint32_t columns[4], rows[4];
    cuda::load_matrices_transposed(shared + lane % 16 * 16 + lane / 16 * 8, columns);
    for (unsigned i = 0; i < 4; ++i) memcpy(&rows[i], a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8, 4);
    for (unsigned i = 0; i < 2; ++i) {
      float sums[4] = {};
      cuda::mma_m16n8k16<__nv_bfloat16>(sums, rows, {columns[2 * i], columns[2 * i + 1]});
      for (unsigned e = 0; e < 4; ++e) d[(g + e / 2 * 8) * 16 + 8 * i + 2 * t + e % 2] += sums[e];
    }
  });
}

int64_t backward_splits_of(int64_t N, int64_t K, int64_t multiprocessors, int64_t resident) {
  return cuda::backward_splits(N, K, multiprocessors, resident);
}

int emulated_int8_linear(const uint8_t* tokens, int64_t M, const uint8_t* packed, int64_t N, int64_t in_features,
                         const int32_t* sums, int dtype, const void* bias, void* output) {
  return cuda::launch_int8_linear(tokens, M, packed, N, row_layout(kInt8, 0, in_features), sums, DType(dtype), bias, output, nullptr);
}

int emulated_fp8_operands(const void* input, int dtype, int64_t M, const uint8_t* packed, int64_t N, int64_t in_features,
                          uint8_t* codes, float* token_scales, float* row_scales) {
  return cuda::launch_fp8_operands(input, DType(dtype), M, packed, N, row_layout(kFP8, 0, in_features), codes, token_scales,
                                   row_scales, nullptr);
}

// Name of the first obstacle, or null where aten::_scaled_mm takes the problem.
const char* fp8_obstacle_of(int64_t M, int64_t N, int64_t K, int dtype, int packed_width, int capability) {
  const int index = cuda::fp8_obstacle({M, N, K, DType(dtype), packed_width, capability});
  return index < 0 ? nullptr : cuda::kFP8Obstacles[index].name;
}

int int8_takes_int_mm(int64_t M, int64_t N, int64_t K) { return cuda::takes_int_mm({M, N, K}); }

// The route of linear (of its backward), and the name of the first obstacle to any but the dense one.
// `forced`: a LinearRoute, or negative.
int linear_route_of(int backward, int64_t M, int64_t N, int64_t K, int format, int64_t block_size, int dtype, int input_width,
                    int packed_width, int wgmma, int forced, const char** name) {
  cuda::LinearProblem p{M, N, K, format, block_size, DType(dtype), input_width, packed_width, wgmma != 0, {}};
  if (forced >= 0) p.forced = cuda::LinearRoute(forced);
  const auto find = [&](const auto& obstacles) {
    for (const cuda::Obstacle& obstacle : obstacles) {
      if (!*name && obstacle.applies(p)) *name = obstacle.name;
    }
  };
  backward ? find(cuda::kBackwardObstacles) : find(cuda::kLinearObstacles);
  return int(backward ? cuda::backward_route(p) : cuda::route(p));
}

int64_t wgmma_splits_of(int64_t N, int64_t K, int64_t multiprocessors) { return cuda::wgmma_splits(N, K, multiprocessors); }
int64_t backward_wgmma_splits_of(int64_t N, int64_t K, int64_t multiprocessors) {
  return cuda::backward_wgmma_splits(N, K, multiprocessors);
}
int64_t tiled_splits_of(int64_t N, int64_t K, int64_t multiprocessors) { return cuda::tiled_splits(N, K, multiprocessors); }

void small_plan_of(int64_t N, int64_t K, int64_t multiprocessors, int64_t* out) {
  const cuda::SmallPlan plan = cuda::small_plan(N, K, multiprocessors);
  out[0] = plan.tiles, out[1] = plan.splits, out[2] = plan.grid;
}

// One step of a list; arrays of `count` entries. hyper: lr, beta1, beta2, eps, weight_decay, momentum, dampening.
// Returns the CUDA error, or -tables (minus the number of launches).
int emulated_optimizer(int rule, int64_t count, void* const* params, const int* param_dtypes, const void* const* grads,
                       const int* grad_dtypes, uint8_t* const* first_codes, float* const* first_scales,
                       uint8_t* const* second_codes, float* const* second_scales, const int64_t* rows, const int64_t* lengths,
                       const int64_t* offsets, const float* step, const double* hyper, int64_t seed, int flags,
                       const float* lr, const float* grad_scale, const float* found_inf) {
  OptimizerHyper h{};
  h.lr = hyper[0], h.beta1 = hyper[1], h.beta2 = hyper[2], h.eps = hyper[3], h.weight_decay = hyper[4];
  h.momentum = hyper[5], h.dampening = hyper[6];
  h.seed = seed, h.stochastic = flags & 1, h.nesterov = flags & 2, h.maximize = flags & 4;
  std::vector<OptimizerTensor> tensors(static_cast<size_t>(count));
  for (size_t i = 0; i < tensors.size(); ++i) {
    OptimizerTensor& t = tensors[i];
    t.param = params[i], t.grad = grads[i];
    t.codes[0] = first_codes[i], t.scales[0] = first_scales[i];
    t.codes[1] = second_codes ? second_codes[i] : nullptr, t.scales[1] = second_scales ? second_scales[i] : nullptr;
    t.row_length = lengths[i], t.blocks_per_row = (lengths[i] + kStateBlock - 1) / kStateBlock;
    t.element_offset = uint64_t(offsets[i]);
    t.param_dtype = DType(param_dtypes[i]), t.grad_dtype = DType(grad_dtypes[i]);
  }
  int tables = 0;
  const cudaError_t error = cuda::for_each_table(
      tensors, std::vector<int64_t>(rows, rows + count), {step}, [&](const cuda::OptimizerTable& table) {
        ++tables;
        return cuda::launch_optimizer(OptimizerRule(rule), table, h, {lr, grad_scale, found_inf}, nullptr);
      });
  return error == cudaSuccess ? -tables : int(error);
}

// Tables of a list of (rows, row length) tensors, without running them: (entries, tasks, blocks covered) per table.
int64_t optimizer_tables(int64_t count, const int64_t* rows, const int64_t* lengths, int64_t* out, int64_t most) {
  std::vector<OptimizerTensor> tensors(static_cast<size_t>(count));
  for (size_t i = 0; i < tensors.size(); ++i)
    tensors[i].row_length = lengths[i], tensors[i].blocks_per_row = (lengths[i] + kStateBlock - 1) / kStateBlock;
  int64_t tables = 0;
  cuda::for_each_table(tensors, std::vector<int64_t>(rows, rows + count), {nullptr}, [&](const cuda::OptimizerTable& table) {
    int64_t blocks = 0, tasks = 0;
    for (int i = 0; i < table.entries; ++i) {
      if (table.entry[i].first_task != tasks) return 1;
      blocks += table.entry[i].blocks;
      tasks += cuda::tasks_of(table.entry[i].blocks, table.entry[i].log2_lanes);
    }
    if (tasks != table.tasks || tables >= most) return 1;
    const int64_t fields[3] = {table.entries, tasks, blocks};
    memcpy(out + 3 * tables++, fields, sizeof fields);
    return 0;
  });
  return tables;
}

// Codes of a * 1 for a block of scale 1, all floats of `x`.
void encode_moments(const float* x, int64_t count, int is_signed, uint8_t* codes) {
  const DynamicMap map = make_dynamic_map(is_signed != 0);
  cuda::ClassTables tables;
  for (uint32_t exponent = 0; exponent < cuda::kExponents; ++exponent) cuda::fill_classes(tables, map, exponent);
  const cuda::ClassLookup classes(tables);
  const cuda::BlockEncoder block = cuda::block_encoder(0x3F800000u);
  for (int64_t i = 0; i < count; i += 4) {
    float value[4] = {};
    for (int64_t j = 0; j < 4 && i + j < count; ++j) value[j] = x[i + j];
    uint32_t word[1];
    if (is_signed) cuda::encode_moments<true>(classes, map.midpoint, block, value, word);
    else cuda::encode_moments<false>(classes, map.midpoint, block, value, word);
    for (int64_t j = 0; j < 4 && i + j < count; ++j) codes[i + j] = uint8_t(word[0] >> (8 * j));
  }
}

// The 4-bit code of each v by the bucket table, and by counting thresholds as the rules say. Returns the first index where
// they differ, or -1.
int64_t check_encode_4bit(const float* v, int64_t count, int fp4) {
  const cuda::EncodeTable table = cuda::make_encode_table(fp4 ? kFP4 : kNF4);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t expected = 0;
    if (fp4) {
      int rank = 0;
      for (float t : kFP4Thresholds.value) rank += (v[i] < 0 ? -v[i] : v[i]) > t;
      expected = kFP4Ascending[rank];
      if (v[i] < 0 && expected != 0) expected |= 8;
    } else {
      for (float t : kNF4Thresholds.value) expected += v[i] > t;
    }
    const uint32_t got = fp4 ? cuda::encode_4bit<true>(table.bucket, v[i]) : cuda::encode_4bit<false>(table.bucket, v[i]);
    if (got != expected) return i;
  }
  return -1;
}

// Every fp8 code through the decoder; every float of `v` through the encoder.
void fp8_decode_all(float* values) {
  for (uint32_t code = 0; code < 256; ++code) values[code] = cuda::fp8_to_float(code);
}
void fp8_encode(const float* v, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) codes[i] = uint8_t(cuda::float_to_fp8(v[i]));
}

// Number of n in {0, 1, d-1, d, d+1, multiples of d and their neighbours, 2^31-1} whose quotient is wrong.
int64_t check_divisor(uint32_t divisor) {
  const cuda::FastDivisor fast(divisor);
  int64_t wrong = 0;
  const auto check = [&](uint64_t n) { wrong += n < (uint64_t(1) << 31) && fast.quotient(uint32_t(n)) != n / divisor; };
  for (uint64_t n : {uint64_t(0), uint64_t(1), (uint64_t(1) << 31) - 1}) check(n);
  for (uint64_t multiple = 1; multiple * divisor < (uint64_t(1) << 31) + divisor; multiple = multiple * 9 / 8 + 1)
    for (uint64_t n : {multiple * divisor - 1, multiple * divisor, multiple * divisor + 1}) check(n);
  const uint64_t last = ((uint64_t(1) << 31) - 1) / divisor * divisor;
  for (uint64_t n : {last, last - 1, last + 1}) check(n);
  return wrong;
}

// Tiles of a grid as rows of (first_row, rows, first_item, items); returns how many there are, writes at most `most`.
int64_t tiles_of(int64_t rows, int64_t items_per_row, int64_t* out, int64_t most) {
  int64_t count = 0;
  cuda::for_each_tile(rows, items_per_row, [&](const cuda::Tile& t) {
    if (count < most) {
      const int64_t fields[4] = {t.first_row, t.rows, t.first_item, t.items};
      memcpy(out + 4 * count, fields, sizeof fields);
    }
    return ++count < most ? 0 : 1;
  });
  return count;
}

int access_width_of(uint64_t address, int64_t pitch) {
  return cuda::access_width(reinterpret_cast<const void*>(address), pitch);
}
}
#pragma GCC visibility pop
