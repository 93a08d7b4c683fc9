// 8-bit optimizer steps: one launch for a whole list of parameters (up to 336, see optimizer_table.h).
//
// A warp takes the blocks of a task: one of 256 elements, or several short rows. Each lane owns 8 consecutive elements of a
// block (16-byte accesses of 16-bit parameters), so absmax is at most 5 shuffles and no barrier. learning rate, gradient
// scale, found_inf and the step counts are read from device memory: nothing waits for the host, a graph can be replayed.
#include "kernels.h"
#include "launch.h"
#include "mma.h"
#include "optimizer_elements.h"
#include "optimizer_table.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kResident = 5;  // CTAs a multiprocessor: 102 registers without spills, 30 KB of loads in flight
constexpr int kWarps = kThreads / 32;

// Both maps: first the signed one.
__constant__ DynamicMap kMaps[2] = {make_dynamic_map(true), make_dynamic_map(false)};

__device__ inline float element(const void* p, uint32_t dtype, int64_t i) {
  if (dtype == uint32_t(DType::kFloat32)) return static_cast<const float*>(p)[i];
  const uint32_t bits = static_cast<const uint16_t*>(p)[i];
  return dtype == uint32_t(DType::kBFloat16) ? bits_float(bits << 16) : to_float(Float16(__half_raw{uint16_t(bits)}));
}

// Two 16-bit elements of one word.
__device__ inline void widen(uint32_t word, uint32_t dtype, float& low, float& high) {
  if (dtype == uint32_t(DType::kBFloat16)) {
    low = bits_float(word << 16);
    high = bits_float(word & 0xFFFF0000u);
  } else {
    low = to_float(Float16(__half_raw{uint16_t(word)}));
    high = to_float(Float16(__half_raw{uint16_t(word >> 16)}));
  }
}

__device__ inline void load_unit(const void* base, uint32_t dtype, int64_t start, int count, bool vector, float (&values)[kUnit]) {
  if (vector && count == kUnit) {
    if (dtype == uint32_t(DType::kFloat32)) {
      const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(base) + start);
      const float4 a = p[0], b = p[1];
      values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
      values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
    } else {
      const uint4 v = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(base) + start);
      widen(v.x, dtype, values[0], values[1]);
      widen(v.y, dtype, values[2], values[3]);
      widen(v.z, dtype, values[4], values[5]);
      widen(v.w, dtype, values[6], values[7]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < int(kUnit); ++i) values[i] = i < count ? element(base, dtype, start + i) : 0.0f;
}

struct Codes {
  uint32_t word[2];
  __device__ uint32_t operator[](int i) const { return (word[i / 4] >> (8 * (i % 4))) & 0xFFu; }
};

// Missing ones are `zero`, the code of 0.0: with a gradient of 0 they change no maximum.
__device__ inline Codes load_codes(const uint8_t* p, int count, bool vector, uint32_t zero) {
  if (vector && count == kUnit) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    return {{v.x, v.y}};
  }
  Codes codes{{0, 0}};
#pragma unroll
  for (int i = 0; i < int(kUnit); ++i) codes.word[i / 4] |= (i < count ? uint32_t(p[i]) : zero) << (8 * (i % 4));
  return codes;
}

__device__ inline void store_codes(uint8_t* p, const Codes& codes, int count, bool vector) {
  if (vector && count == kUnit) {
    *reinterpret_cast<uint2*>(p) = make_uint2(codes.word[0], codes.word[1]);
    return;
  }
#pragma unroll
  for (int i = 0; i < int(kUnit); ++i) {
    if (i < count) p[i] = uint8_t(codes[i]);
  }
}

// Two parameters as 16-bit patterns, to nearest.
__device__ inline uint32_t narrow(float low, float high, uint32_t dtype) {
  if (dtype == uint32_t(DType::kBFloat16))
    return static_cast<__nv_bfloat16_raw>(from_float<BFloat16>(low)).x | uint32_t(static_cast<__nv_bfloat16_raw>(from_float<BFloat16>(high)).x) << 16;
  return static_cast<__half_raw>(from_float<Float16>(low)).x | uint32_t(static_cast<__half_raw>(from_float<Float16>(high)).x) << 16;
}
__device__ inline uint32_t narrow_stochastic(float v, uint32_t dtype, uint32_t random) {
  return dtype == uint32_t(DType::kBFloat16) ? round_stochastic_bfloat16(v, random) : round_stochastic_float16(v, random);
}

__device__ inline void store_params(const TableEntry& t, uint32_t dtype, int64_t start, int count, bool vector,
                                    const OptimizerScalars& s, const float (&values)[kUnit]) {
  if (dtype == uint32_t(DType::kFloat32)) {
    float* p = static_cast<float*>(t.param) + start;
    if (vector && count == kUnit) {
      reinterpret_cast<float4*>(p)[0] = make_float4(values[0], values[1], values[2], values[3]);
      reinterpret_cast<float4*>(p)[1] = make_float4(values[4], values[5], values[6], values[7]);
      return;
    }
#pragma unroll
    for (int i = 0; i < int(kUnit); ++i) {
      if (i < count) p[i] = values[i];
    }
    return;
  }
  uint32_t word[kUnit / 2] = {};
  if (s.stochastic) {
    const uint64_t index = t.element_offset + uint64_t(start);
    const Philox now = philox(index / 8, s.step, s.seed);
    Philox next{};
    if (index % 8 != 0) next = philox(index / 8 + 1, s.step, s.seed);
#pragma unroll
    for (int i = 0; i < int(kUnit); ++i) {
      const uint32_t at = uint32_t(index % 8) + unsigned(i);
      word[i / 2] |= narrow_stochastic(values[i], dtype, at < 8 ? random16(now, at) : random16(next, at % 8)) << (16 * (i % 2));
    }
  } else {
#pragma unroll
    for (int i = 0; i < int(kUnit) / 2; ++i) word[i] = narrow(values[2 * i], values[2 * i + 1], dtype);
  }
  uint16_t* p = static_cast<uint16_t*>(t.param) + start;
  if (vector && count == kUnit) {
    *reinterpret_cast<uint4*>(p) = make_uint4(word[0], word[1], word[2], word[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < int(kUnit); ++i) {
    if (i < count) p[i] = uint16_t(word[i / 2] >> (16 * (i % 2)));
  }
}

// Maximum over groups of `lanes` neighbouring threads; every thread of the warp must call it.
__device__ inline uint32_t group_max(uint32_t value, uint32_t lanes) {
  for (uint32_t offset = lanes / 2; offset > 0; offset /= 2)
    value = max(value, __shfl_xor_sync(0xFFFFFFFFu, value, int(offset)));
  return value;
}

template <bool SIGNED>
__device__ inline Codes encode_unit(const ClassLookup& classes, const float (&values)[kUnit], const BlockEncoder& block) {
  Codes codes{{0, 0}};
  encode_moments<SIGNED>(classes, kMaps[SIGNED ? 0 : 1].midpoint, block, values, codes.word);
  return codes;
}

template <OptimizerRule RULE, bool PLAIN>
__device__ inline void update_task(const TableEntry& t, uint32_t task, const ClassLookup (&classes)[2], const ByteTable (&values)[2],
                                   const OptimizerScalars& s) {
  constexpr bool kTwo = RULE == OptimizerRule::kAdamW || RULE == OptimizerRule::kAdam;
  constexpr uint32_t kBF16 = uint32_t(DType::kBFloat16);
  const uint32_t param_dtype = PLAIN ? kBF16 : t.param_dtype, grad_dtype = PLAIN ? kBF16 : t.grad_dtype;
  const bool vector = PLAIN || t.access != Access::kElements;
  const uint32_t lane = threadIdx.x % 32, lanes = PLAIN ? 32 : 1u << t.log2_lanes;
  const uint32_t block = PLAIN ? task : (task << (5 - t.log2_lanes)) + (lane >> t.log2_lanes);  // below 2^31 + 32
  const bool present = PLAIN || block < t.blocks;
  int64_t start = int64_t(uint64_t(task * 32 + lane) * kUnit);
  int count = kUnit;
  if constexpr (!PLAIN) {
    const uint32_t row = t.blocks_per_row.quotient(present ? block : 0);
    const int64_t column = (present ? block - row * t.blocks_per_row.divisor : 0) * kStateBlock + (lane & (lanes - 1)) * kUnit;
    const int64_t left = t.row_length - column;
    start = row * t.row_length + column;
    count = !present || left <= 0 ? 0 : left < kUnit ? int(left) : int(kUnit);
  }

  float param[kUnit], grad[kUnit], first[kUnit], second[kUnit];
  load_unit(t.param, param_dtype, start, count, vector, param);
  load_unit(t.grad, grad_dtype, start, count, vector, grad);
  const Codes first_codes = load_codes(t.codes[0] + start, count, vector, 127);
  const Codes second_codes = kTwo ? load_codes(t.codes[1] + start, count, vector, 0) : Codes{{0, 0}};
  const float first_scale = present ? t.scales[0][block] : 0.0f;
  const float second_scale = kTwo && present ? t.scales[1][block] : 0.0f;

  // Lion interpolates the same moment twice, with two weights.
  const BlockScalars b = block_scalars(s, first_scale, kTwo ? second_scale : first_scale);
  uint32_t first_max = 0, second_max = 0;
#pragma unroll
  for (int i = 0; i < int(kUnit); ++i) {
    const Updated u = update_element<RULE>(b, param[i], grad[i], values[0].at(first_codes.word[i / 4], i % 4),
                                           kTwo ? values[1].at(second_codes.word[i / 4], i % 4) : 0.0f);
    param[i] = u.param;
    first[i] = u.first;
    second[i] = u.second;
    first_max = max(first_max, float_bits(u.first) & 0x7FFFFFFFu);
    if (kTwo) second_max = max(second_max, float_bits(u.second));
  }
  if constexpr (kTwo) step_by_moments<RULE>(b, first, second, first_max, second_max, param);
  if (max(first_max, second_max) >= 0x7F800000u) {  // rare: some are not finite, or second ones negative
    first_max = second_max = 0;
#pragma unroll
    for (int i = 0; i < int(kUnit); ++i) {
      restart_unless_finite(first[i], second[i]);
      first_max = max(first_max, float_bits(first[i]) & 0x7FFFFFFFu);
      if (kTwo) second_max = max(second_max, float_bits(second[i]) & 0x7FFFFFFFu);
      if (kTwo && !(second[i] > 0.0f)) second[i] = 0.0f;  // negative ones have the code of 0
    }
  }
  __syncwarp();
  first_max = group_max(first_max, lanes);
  if (kTwo) second_max = group_max(second_max, lanes);
  if (count == 0) return;

  if (max(first_max, second_max) > kLargestScale) {  // rare
    const float first_part = first_max > kLargestScale ? 0.25f : 1.0f, second_part = second_max > kLargestScale ? 0.25f : 1.0f;
#pragma unroll
    for (int i = 0; i < int(kUnit); ++i) {
      first[i] = mul_ftz(first[i], first_part);
      if (kTwo) second[i] = mul_ftz(second[i], second_part);
    }
  }
  store_params(t, param_dtype, start, count, vector, s, param);
  const BlockEncoder first_block = block_encoder(first_max);
  store_codes(t.codes[0] + start, encode_unit<true>(classes[0], first, first_block), count, vector);
  if ((lane & (lanes - 1)) == 0) t.scales[0][block] = first_block.scale;
  if constexpr (kTwo) {
    const BlockEncoder second_block = block_encoder(second_max);
    store_codes(t.codes[1] + start, encode_unit<false>(classes[1], second, second_block), count, vector);
    if ((lane & (lanes - 1)) == 0) t.scales[1][block] = second_block.scale;
  }
}

// Asks L2 for what a lane will read of a plain task: its 8 parameters, gradients and codes.
template <OptimizerRule RULE>
__device__ inline void fetch_plain(const TableEntry& t, uint32_t task) {
  const int64_t start = int64_t(uint64_t(task * 32 + threadIdx.x % 32) * kUnit);
  if (threadIdx.x % 2 == 0) {  // a line of L2 is 128 bytes, a sector 32
    prefetch_l2(static_cast<const uint16_t*>(t.param) + start);
    prefetch_l2(static_cast<const uint16_t*>(t.grad) + start);
  }
  if (threadIdx.x % 4 == 0) {
    prefetch_l2(t.codes[0] + start);
    if (RULE == OptimizerRule::kAdamW || RULE == OptimizerRule::kAdam) prefetch_l2(t.codes[1] + start);
  }
}

template <OptimizerRule RULE>
__global__ void __launch_bounds__(kThreads, kResident)
    optimizer_kernel(const __grid_constant__ OptimizerTable table, const OptimizerHyper hyper, const OptimizerInputs inputs) {
  __shared__ ClassTables class_tables[2];
  __shared__ float decoded[2][256];
  __shared__ OptimizerScalars scalars[kWarps];  // of the step count that each warp works with
  for (uint32_t i = threadIdx.x; i < 256; i += kThreads) {
    decoded[0][i] = decode_signed(kMaps[0], i);
    decoded[1][i] = decode_unsigned(kMaps[1], i);
    fill_classes(class_tables[i / kExponents], kMaps[i / kExponents], i % kExponents);
  }
  __syncthreads();
  const ClassLookup classes[2] = {ClassLookup(class_tables[0]), ClassLookup(class_tables[1])};
  const ByteTable values[2] = {ByteTable(decoded[0]), ByteTable(decoded[1])};
  if (inputs.found_inf && *inputs.found_inf != 0.0f) return;
  const double lr = inputs.lr ? double(*inputs.lr) : hyper.lr;
  const double grad_scale = inputs.grad_scale ? double(*inputs.grad_scale) : 1.0;
  const uint32_t warp = threadIdx.x / 32;
  float known_step = bits_float(kNaNBits);  // differs from everything
  TaskCursor<OptimizerTable> cursor;
  for (uint32_t task = blockIdx.x * kWarps + warp; task < table.tasks; task += gridDim.x * kWarps) {
    const TableEntry& t = cursor.at(table, task);
    const float step = *t.step;
    if (step != known_step) {
      HALFBYTE_DEVICE_ASSERT(step >= 1.0f && step <= 0x1p24f && "halfbyte: steps must be from 1 to 2^24");
      __syncwarp();
      if (threadIdx.x % 32 == 0) scalars[warp] = optimizer_scalars(RULE, hyper, lr, grad_scale, uint32_t(step));
      __syncwarp();
      known_step = step;
    }
    if (t.access == Access::kPlain) {
      const uint32_t next = task - t.first_task + gridDim.x * kWarps;
      if (next < t.blocks) fetch_plain<RULE>(t, next);
      update_task<RULE, true>(t, task - t.first_task, classes, values, scalars[warp]);
    } else update_task<RULE, false>(t, task - t.first_task, classes, values, scalars[warp]);
  }
}

using Kernel = void (*)(OptimizerTable, OptimizerHyper, OptimizerInputs);

Kernel kernel_for(OptimizerRule rule) {
  switch (rule) {
    case OptimizerRule::kAdamW: return optimizer_kernel<OptimizerRule::kAdamW>;
    case OptimizerRule::kAdam: return optimizer_kernel<OptimizerRule::kAdam>;
    case OptimizerRule::kLion: return optimizer_kernel<OptimizerRule::kLion>;
    default: return optimizer_kernel<OptimizerRule::kSGD>;
  }
}

}  // namespace

cudaError_t launch_optimizer(OptimizerRule rule, const OptimizerTable& table, const OptimizerHyper& hyper,
                             const OptimizerInputs& inputs, cudaStream_t stream) {
  const unsigned needed = (table.tasks + kWarps - 1) / kWarps, most = unsigned(multiprocessors()) * kResident;
  return launch(kernel_for(rule), needed < most ? needed : most, 1, kThreads, 0, stream, table, hyper, inputs);
}

}  // namespace halfbyte::cuda
