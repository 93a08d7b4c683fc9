// quantize and quantize_with_scales: float rows -> packed rows, byte for byte what csrc/cpu writes (docs/formats.md).
//
// nf4, fp4: `lanes` threads of a warp own one block; each takes units of 8 elements (one 16-byte load of 16-bit inputs, one
// 4-byte store of codes), so a block of 64 is 8 lanes and its absmax three shuffles. Up to 256 elements stay in registers,
// larger blocks are read again, from L1. -dq, int8 and fp8 have one scale (or step and low) per row: one CTA per row.
//
// quantize_segments_kernel is the way of nf4 and fp4 weights of a model (blocks of up to 256, rows of whole 16-byte loads): a warp
// takes 1024 elements of one row, addresses are made once per 32 of a lane, and the encoder's table lies in the lanes of the warp.
//
// All work through a table of tensors (task_table.h): one entry for quantize, up to kListEntries for quantize_list.
#include "kernels.h"
#include "row_units.h"
#include "task_table.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct QuantizeEntry {
  const void* input;     // first row, as all addresses
  const float* scales;   // (rows, num_blocks), or null: computed
  uint8_t* packed;
  RowLayout layout;
  int64_t first_block;   // of this entry within a row: not 0 only where a row has more than a launch takes
  FastDivisor blocks;    // per row of this entry; a block may be a segment, or the whole row
  uint32_t total_blocks;
  uint32_t first_task;   // tasks: CTAs full of blocks, segments, or rows
  int load_width;        // bytes an input load may take
};

// Threads that share a block: 4..32; and units of a full block, a multiple of them.
struct Sharing {
  int lanes, units;
};

constexpr int kListEntries = 28;

template <int N>
struct QuantizeArgs {
  TaskTable<QuantizeEntry, N> table;
  int block_shift;  // log2 of the block size (segments)
  Sharing sharing;
  EncodeTable encode;
  LaneBuckets lane_buckets;
};
static_assert(sizeof(QuantizeArgs<kListEntries>) <= 4096, "kernel arguments of any driver");

template <int N>
using Cursor = TaskCursor<TaskTable<QuantizeEntry, N>>;

__device__ inline int clamp_count(int64_t left) { return left <= 0 ? 0 : left < kUnit ? int(left) : int(kUnit); }

// Codes of `count` elements as nibbles, high first; a missing last element is the code of 0.0.
template <bool FP4>
__device__ inline void store_codes_4bit(const Bucket* table, const float (&values)[kUnit], int count, float scale,
                                        uint8_t* target) {
  constexpr uint32_t kZero = FP4 ? 0 : 7;
  const bool coded = scale > 0.0f;  // false for 0 and NaN
  const Normalizer normalize(scale);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < int(kUnit); ++i) {
    const uint32_t code = coded && i < count ? encode_4bit<FP4>(table, normalize(values[i])) : kZero;
    word |= code << (8 * (i / 2) + (i % 2 ? 0 : 4));
  }
  if (count == kUnit) {
    *reinterpret_cast<uint32_t*>(target) = word;  // rows are 16-byte aligned, units start at multiples of 4 bytes
  } else {
    for (int i = 0; i < (count + 1) / 2; ++i) target[i] = uint8_t(word >> (8 * i));
  }
}

__device__ inline void store_float(uint8_t* target, float value) { *reinterpret_cast<float*>(target) = value; }

// Zeros of a row that neither codes nor scales cover: at most 3 bytes before the scales and 15 after.
__device__ inline void store_padding(uint8_t* row, const RowLayout& l, int64_t codes_end, int64_t scales_end) {
  for (int64_t i = codes_end; i < l.scales_offset; ++i) row[i] = 0;
  for (int64_t i = scales_end; i < l.row_bytes; ++i) row[i] = 0;
}

// One 4-bit block, by the threads that share it, of which this is number `lane`. `absent` groups only take part in the shuffles.
template <class T, bool Registers>
__device__ inline uint32_t block_largest(const Sharing& a, int load_width, const T* block, int64_t length, int lane,
                                         float (&values)[kUnit]) {
  uint32_t largest = 0;
  for (int u = lane; u < a.units; u += a.lanes) {
    load_unit(block + u * kUnit, clamp_count(length - u * kUnit), load_width, values);
    largest = max(largest, largest_bits(values));
    if constexpr (Registers) break;
  }
  return group_max(largest, a.lanes);
}

template <class T, bool FP4, bool Registers>
__device__ inline void encode_block(const Sharing& a, int load_width, const Bucket* table, const T* block, int64_t length, int lane,
                                    float scale, float (&values)[kUnit], uint8_t* codes) {
  for (int u = lane; u < a.units; u += a.lanes) {
    const int count = clamp_count(length - u * kUnit);
    if (count == 0) break;
    if constexpr (!Registers) load_unit(block + u * kUnit, count, load_width, values);
    store_codes_4bit<FP4>(table, values, count, scale, codes + u * (kUnit / 2));
    if constexpr (Registers) break;
  }
}

__device__ inline void share_table(const EncodeTable& source, Bucket* table) {
  if (threadIdx.x < 32) table[threadIdx.x] = source.bucket[threadIdx.x];
  __syncthreads();
}

template <class T, bool FP4, bool Registers, int N>
__global__ void __launch_bounds__(kThreads) quantize_blocks_kernel(const __grid_constant__ QuantizeArgs<N> a) {
  __shared__ Bucket table[32];
  share_table(a.encode, table);
  const int lanes = a.sharing.lanes, lane = int(threadIdx.x) % lanes;
  Cursor<N> cursor;
  // The bound is the same for a whole CTA, so that every thread reaches the shuffles.
  for (uint32_t task = blockIdx.x; task < a.table.tasks; task += gridDim.x) {
    const QuantizeEntry& e = cursor.at(a.table, task);
    const RowLayout& l = e.layout;
    const uint32_t index = cursor.within(e, task) * uint32_t(kThreads / lanes) + threadIdx.x / unsigned(lanes);
    const bool present = index < e.total_blocks;
    const uint32_t r = e.blocks.quotient(present ? index : 0);
    const int64_t b = e.first_block + (present ? index - r * e.blocks.divisor : 0), start = b * l.block_size;
    const int64_t left = l.in_features - start;
    const int64_t length = !present ? 0 : left < l.block_size ? left : l.block_size;
    const T* block = static_cast<const T*>(e.input) + r * l.in_features + start;
    float values[kUnit];
    const uint32_t largest = block_largest<T, Registers>(a.sharing, e.load_width, block, length, lane, values);
    if (!present) continue;
    const float scale = block_scale(largest, e.scales ? e.scales + r * l.num_blocks + b : nullptr);
    uint8_t* row = e.packed + r * l.row_bytes;
    encode_block<T, FP4, Registers>(a.sharing, e.load_width, table, block, length, lane, scale, values, row + start / 2);
    if (lane == 0) {
      store_float(row + l.scales_offset + 4 * b, scale);
      if (b == l.num_blocks - 1) store_padding(row, l, l.code_bytes, l.scales_offset + 4 * l.num_blocks);
    }
  }
}

constexpr int kSegmentUnits = 4;                          // of a lane
constexpr int64_t kSegment = 32 * kSegmentUnits * kUnit;  // 1024 elements of one row
constexpr int64_t kSegmentMostColumns = (int64_t(1) << 31) - kSegment;  // columns are 32-bit there

// Codes of 8 values that the block's scale has normalized; every lane of the warp takes part. Given: the scale did not come from
// the values themselves, so that some may lie outside [-1, 1], where a bucket would come round again.
template <bool FP4, bool Given>
__device__ inline uint32_t encode_unit(float lane_threshold, uint32_t lane_rank, const float (&v)[kUnit]) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < int(kUnit); ++i) {
    const float position = FP4 ? bits_float(float_bits(v[i]) & 0x7FFFFFFFu) : v[i];
    const float inside = !Given ? position : position > 1.0f ? 1.0f : position < -1.0f ? -1.0f : position;
    const int bucket = int(float_bits(fma_rn(inside, 15.0f, 12582928.0f)));  // bucket_of, unmasked
    const float threshold = __shfl_sync(0xFFFFFFFFu, lane_threshold, bucket);
    const uint32_t rank = __shfl_sync(0xFFFFFFFFu, lane_rank, bucket);
    const int shift = 8 * (i / 2) + (i % 2 ? 0 : 4);
    if constexpr (FP4) {
      uint32_t code = kFP4CodesByRank >> (4 * (rank + (position > threshold ? 1u : 0u))) & 7u;
      if (v[i] < 0.0f && code != 0) code |= 8u;
      word |= code << shift;
    } else {
      word += rank << shift;
      if (position > threshold) word += 1u << shift;
    }
  }
  return word;
}

// CTAs a multiprocessor that the registers are for: a list's need some for where it is. 3 still have 48 KB in flight.
template <int N>
constexpr int kResidentOf = N > 1 ? 3 : 4;

template <class T, bool FP4, bool Given, int N>
__global__ void __launch_bounds__(kThreads, kResidentOf<N>) quantize_segments_kernel(const __grid_constant__ QuantizeArgs<N> a) {
  constexpr int kStride = 32 * int(kUnit);
  const uint32_t lane = threadIdx.x % 32;
  const float lane_threshold = a.lane_buckets.threshold[lane];
  const uint32_t lane_rank = a.lane_buckets.rank[lane];
  Cursor<N> cursor;
  for (uint32_t task = blockIdx.x * kWarps + threadIdx.x / 32; task < a.table.tasks; task += gridDim.x * kWarps) {
    const QuantizeEntry& e = cursor.at(a.table, task);
    const RowLayout& l = e.layout;
    const uint32_t segment = cursor.within(e, task), columns = uint32_t(l.in_features);
    const uint32_t row_index = e.blocks.quotient(segment);
    const int64_t r = row_index;
    const uint32_t column = (segment - row_index * e.blocks.divisor) * uint32_t(kSegment) + lane * uint32_t(kUnit);
    const T* input = static_cast<const T*>(e.input) + r * l.in_features + column;
    uint8_t* row = e.packed + r * l.row_bytes;
    float v[kSegmentUnits][kUnit];
    uint32_t largest[kSegmentUnits];
#pragma unroll
    for (int u = 0; u < kSegmentUnits; ++u) {
      load_unit(input + u * kStride, column + u * kStride < columns ? int(kUnit) : 0, 16, v[u]);
      largest[u] = largest_bits(v[u]);
    }
    for (int offset = a.sharing.lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int u = 0; u < kSegmentUnits; ++u) largest[u] = max(largest[u], __shfl_xor_sync(0xFFFFFFFFu, largest[u], offset));
    }
    float scale[kSegmentUnits];
    bool plain = true;  // all of the lane's scales have a reciprocal: hardly ever false
#pragma unroll
    for (int u = 0; u < kSegmentUnits; ++u) {
      const int64_t block = (column + u * kStride) >> a.block_shift;
      const bool given = Given && column + u * kStride < columns;
      scale[u] = block_scale(largest[u], given ? e.scales + r * l.num_blocks + block : nullptr);
      plain = plain && scale[u] > 0.0f && !Normalizer(scale[u]).divide;
    }
#pragma unroll
    for (int u = 0; u < kSegmentUnits; ++u) {
      if (plain) {
#pragma unroll
        for (int i = 0; i < int(kUnit); ++i) v[u][i] = Normalizer(scale[u]).product(v[u][i]);
      } else {
        normalize_unit(Normalizer(scale[u]), v[u]);
      }
    }
    __syncwarp();
    const bool first = (lane & uint32_t(a.sharing.lanes - 1)) == 0;  // of its block; a unit further is 256 elements, whole blocks
#pragma unroll
    for (int u = 0; u < kSegmentUnits; ++u) {
      const uint32_t word = encode_unit<FP4, Given>(lane_threshold, lane_rank, v[u]);
      if (column + u * kStride >= columns) continue;
      *reinterpret_cast<uint32_t*>(row + column / 2 + u * kStride / 2) = word;
      if (first) store_float(row + l.scales_offset + 4 * ((column + u * kStride) >> a.block_shift), scale[u]);
    }
    if (column == 0) store_padding(row, l, l.code_bytes, l.scales_offset + 4 * l.num_blocks);
  }
}

// A -dq row: pass 1 finds the smallest and largest absmax, pass 2 encodes; the row is read four times, three from cache.
template <class T, bool FP4, int N>
__global__ void __launch_bounds__(kThreads) quantize_rows_dq_kernel(const __grid_constant__ QuantizeArgs<N> a) {
  __shared__ Bucket table[32];
  __shared__ uint32_t shared[kWarps];
  share_table(a.encode, table);
  const int lane = int(threadIdx.x) % a.sharing.lanes;
  const int64_t groups = kThreads / a.sharing.lanes, group = threadIdx.x / unsigned(a.sharing.lanes);
  Cursor<N> cursor;
  for (uint32_t task = blockIdx.x; task < a.table.tasks; task += gridDim.x) {
    const QuantizeEntry& e = cursor.at(a.table, task);
    const RowLayout& l = e.layout;
    const uint32_t r = cursor.within(e, task);
    const T* input = static_cast<const T*>(e.input) + r * l.in_features;
    uint8_t* row = e.packed + r * l.row_bytes;
    float values[kUnit];
    const auto scale_of = [&](int64_t b) {
      const int64_t left = l.in_features - b * l.block_size;
      const int64_t length = b >= l.num_blocks ? 0 : left < l.block_size ? left : l.block_size;
      const uint32_t largest = block_largest<T, false>(a.sharing, e.load_width, input + b * l.block_size, length, lane, values);
      return block_scale(largest, e.scales && b < l.num_blocks ? e.scales + r * l.num_blocks + b : nullptr);
    };
    // Scales are not negative, so their bits compare like the floats; NaN sorts above all. ~ turns min into max.
    uint32_t most = 0, least = 0;
    for (int64_t base = 0; base < l.num_blocks; base += groups) {
      const uint32_t bits = float_bits(scale_of(base + group));
      if (base + group < l.num_blocks) {
        most = max(most, bits);
        least = max(least, ~bits);
      }
    }
    most = cta_max(most, shared);
    least = ~cta_max(least, shared);
    const bool valid = most < 0x7F800000u;
    const float low = valid ? bits_float(least) : bits_float(kNaNBits);
    const float step = valid ? div_rn(sub_rn(bits_float(most), low), 255.0f) : bits_float(kNaNBits);
    for (int64_t base = 0; base < l.num_blocks; base += groups) {
      const int64_t b = base + group;
      const float scale = scale_of(b);
      if (b >= l.num_blocks) continue;
      const int64_t left = l.in_features - b * l.block_size;
      encode_block<T, FP4, false>(a.sharing, e.load_width, table, input + b * l.block_size,
                                  left < l.block_size ? left : l.block_size, lane, valid ? scale : bits_float(kNaNBits), values, row + b * l.block_size / 2);
      if (lane == 0) {
        const float u = !valid || step == 0.0f ? 0.0f : rintf(div_rn(sub_rn(scale, low), step));
        row[l.code_bytes + b] = uint8_t(u < 255.0f ? u : 255.0f);
      }
    }
    if (threadIdx.x == 0) {
      store_float(row + l.scales_offset, step);
      store_float(row + l.scales_offset + 4, low);
      store_padding(row, l, l.code_bytes + l.num_blocks, l.scales_offset + 8);
    }
  }
}

template <bool FP8>
__device__ inline void store_codes_8bit(float (&values)[kUnit], int count, const RowNormalizer& normalize, uint8_t* target) {
  normalize_unit(normalize, values);
  const uint2 words = codes_of<FP8>(values);
  if (count == kUnit) {
    *reinterpret_cast<uint2*>(target) = words;
  } else {
#pragma unroll
    for (int i = 0; i < int(kUnit); ++i) {
      if (i < count) target[i] = uint8_t((i < 4 ? words.x : words.y) >> (8 * (i % 4)));
    }
  }
}

// An int8 or fp8 row: pass 1 finds the absmax, pass 2 encodes.
template <class T, bool FP8, int N>
__global__ void __launch_bounds__(kThreads) quantize_rows_8bit_kernel(const __grid_constant__ QuantizeArgs<N> a) {
  __shared__ uint32_t shared[kWarps];
  Cursor<N> cursor;
  for (uint32_t task = blockIdx.x; task < a.table.tasks; task += gridDim.x) {
    const QuantizeEntry& e = cursor.at(a.table, task);
    const RowLayout& l = e.layout;
    const int64_t units = units_of(l.in_features);
    const uint32_t r = cursor.within(e, task);
    const T* input = static_cast<const T*>(e.input) + r * l.in_features;
    uint8_t* row = e.packed + r * l.row_bytes;
    float values[kUnit];
    uint32_t largest = 0;
    for (int64_t u = threadIdx.x; u < units; u += kThreads) {
      load_unit(input + u * kUnit, clamp_count(l.in_features - u * kUnit), e.load_width, values);
      largest = max(largest, largest_bits(values));
    }
    const float scale = block_scale(cta_max(largest, shared), e.scales ? e.scales + r : nullptr);
    const RowNormalizer normalize(scale, FP8 ? kFP8Max : kInt8Max);
    for (int64_t u = threadIdx.x; u < units; u += kThreads) {
      const int count = clamp_count(l.in_features - u * kUnit);
      load_unit(input + u * kUnit, count, e.load_width, values);
      store_codes_8bit<FP8>(values, count, normalize, row + u * kUnit);
    }
    if (threadIdx.x == 0) {
      store_float(row + l.scales_offset, scale);
      store_padding(row, l, l.code_bytes, l.scales_offset + 4);
    }
  }
}

template <int N>
using Kernel = void (*)(QuantizeArgs<N>);

template <class T, int N>
Kernel<N> kernel_for(int32_t format, bool registers) {
  switch (format) {
    case kNF4: return registers ? quantize_blocks_kernel<T, false, true, N> : quantize_blocks_kernel<T, false, false, N>;
    case kFP4: return registers ? quantize_blocks_kernel<T, true, true, N> : quantize_blocks_kernel<T, true, false, N>;
    case kNF4DQ: return quantize_rows_dq_kernel<T, false, N>;
    case kFP4DQ: return quantize_rows_dq_kernel<T, true, N>;
    case kInt8: return quantize_rows_8bit_kernel<T, false, N>;
    default: return quantize_rows_8bit_kernel<T, true, N>;
  }
}

template <class T, int N>
Kernel<N> segments_kernel_for(bool fp4, bool given) {
  if constexpr (N == 1) {  // lists have no given scales
    if (given) return fp4 ? quantize_segments_kernel<T, true, true, N> : quantize_segments_kernel<T, false, true, N>;
  }
  return fp4 ? quantize_segments_kernel<T, true, false, N> : quantize_segments_kernel<T, false, false, N>;
}

template <int N>
Kernel<N> kernel_for(DType dtype, int32_t format, bool segments, bool registers, bool given) {
  const auto of = [&]<class T>(T) {
    return segments ? segments_kernel_for<T, N>(is_fp4(format), given) : kernel_for<T, N>(format, registers);
  };
  switch (dtype) {
    case DType::kFloat32: return of(float{});
    case DType::kBFloat16: return of(BFloat16{});
    default: return of(Float16{});
  }
}

Sharing sharing_of(const RowLayout& l) {
  if (!is_4bit(l.format)) return {};
  const int units = int(l.block_size / kUnit);
  return {units < 32 ? units : 32, units};
}

int load_width_of(const QuantizeTensor& t, int64_t element_size) { return access_width(t.input, t.layout.in_features * element_size); }

// Whether quantize_segments_kernel takes a tensor.
bool takes_segments(const QuantizeTensor& t, int64_t element_size) {
  const RowLayout& l = t.layout;
  const Sharing sharing = sharing_of(l);
  return (l.format == kNF4 || l.format == kFP4) && sharing.units == sharing.lanes && load_width_of(t, element_size) >= 16 &&
         l.in_features % kUnit == 0 && l.in_features <= kSegmentMostColumns;
}

// The tensors that quantize_segments_kernel takes, or the others, N a launch; they share format, block size and dtype.
template <int N>
cudaError_t launch_tensors(const QuantizeTensor* tensors, size_t count, bool segments, DType dtype, cudaStream_t stream) {
  const int64_t element_size = dtype == DType::kFloat32 ? 4 : 2;
  const RowLayout& common = tensors[0].layout;
  const bool by_block = common.format == kNF4 || common.format == kFP4;
  QuantizeArgs<N> args{};
  args.sharing = sharing_of(common);
  if (is_4bit(common.format)) args.encode = make_encode_table(common.format);
  if (segments) {
    args.block_shift = log2_of(common.block_size);
    args.lane_buckets = make_lane_buckets(common.format);
  }
  const bool given = tensors[0].scales != nullptr;
  const Kernel<N> kernel = kernel_for<N>(dtype, common.format, segments, args.sharing.units == args.sharing.lanes, given);
  const unsigned most = unsigned(multiprocessors()) * 32, tasks_per_cta = segments ? kWarps : 1;
  const uint32_t blocks_per_task = !segments && by_block ? uint32_t(kThreads / args.sharing.lanes) : 1;
  const auto launch_table = [&](const TaskTable<QuantizeEntry, N>& table) {
    args.table = table;
    const unsigned needed = (table.tasks + tasks_per_cta - 1) / tasks_per_cta;
    return launch(kernel, needed < most ? needed : most, 1, kThreads, 0, stream, args);
  };
  TableLauncher<TaskTable<QuantizeEntry, N>, decltype(launch_table)> tables(launch_table);
  for (size_t i = 0; i < count; ++i) {
    const QuantizeTensor& t = tensors[i];
    if (takes_segments(t, element_size) != segments) continue;
    const RowLayout& l = t.layout;
    const int64_t items = segments ? (l.in_features + kSegment - 1) / kSegment : by_block ? l.num_blocks : 1;
    const int failed = for_each_tile(t.rows, items, [&](const Tile& tile) {
      QuantizeEntry e{};
      e.input = static_cast<const char*>(t.input) + tile.first_row * l.in_features * element_size;
      e.scales = t.scales ? t.scales + tile.first_row * l.num_blocks : nullptr;
      e.packed = t.packed + tile.first_row * l.row_bytes;
      e.layout = l;
      e.first_block = tile.first_item;
      e.blocks = FastDivisor(uint32_t(tile.items));
      e.total_blocks = uint32_t(tile.rows * tile.items);
      e.load_width = load_width_of(t, element_size);
      return tables.add(e, (e.total_blocks + blocks_per_task - 1) / blocks_per_task) ? 0 : 1;
    });
    if (failed) break;
  }
  return tables.finish();
}

}  // namespace

cudaError_t launch_quantize(const QuantizeTensor* tensors, size_t count, DType dtype, cudaStream_t stream) {
  const int64_t element_size = dtype == DType::kFloat32 ? 4 : 2;
  for (const bool segments : {true, false}) {
    size_t taken = 0;
    for (size_t i = 0; i < count; ++i) taken += takes_segments(tensors[i], element_size) == segments;
    if (taken == 0) continue;
    const cudaError_t error = count == 1 ? launch_tensors<1>(tensors, count, segments, dtype, stream)
                                         : launch_tensors<kListEntries>(tensors, count, segments, dtype, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace halfbyte::cuda
