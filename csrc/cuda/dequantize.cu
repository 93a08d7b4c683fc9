// dequantize and embedding: packed rows -> float rows. One fp32 product, one rounding to the output type.
//
// One thread decodes units of 8 elements: a 4-byte load (8 for the row formats), one scale, one 16-byte store for 16-bit
// outputs, so that a warp writes 512 contiguous bytes. 4 units a thread are loaded before the first is decoded: 4 * 4 bytes
// * 2048 threads = 32 KB in flight per multiprocessor, where reads at full speed need about 6.
//
// dequantize_segments_kernel is the way of every weight of a model: a warp takes 1024 elements of one row, so that addresses
// are made once per 32 weights of a lane, and the codebook lies in the lanes of the warp (a shuffle wants no masked index).
// dequantize_kernel takes the rest, rows that no 16-byte store fits and misaligned ones, unit by unit with every check.
//
// Both work through a table of tensors (task_table.h), one entry for dequantize and embedding, up to kListEntries for
// dequantize_list.
#include "elements.h"
#include "geometry.h"
#include "kernels.h"
#include "launch.h"
#include "task_table.h"

namespace halfbyte::cuda {
namespace {

constexpr int kThreads = 256;

// The assertion of embedding is a call, which costs registers: 4 units in flight would spill.
template <bool Gather>
constexpr int kUnrollOf = Gather ? 2 : 4;

// How codes become floats; the two 4-bit codebooks differ by the table only.
enum class Scheme { k4Bit, k4BitDQ, kInt8, kFP8 };

struct Codebook {
  float value[16];
};

struct DequantizeEntry {
  const uint8_t* packed;  // first row; embedding: row 0 of the table
  void* output;           // first row
  int64_t in_features, row_bytes, code_bytes, scales_offset;
  int64_t first_item;     // of this entry within a row: not 0 only where a row has more units than a launch takes
  FastDivisor items;      // units or segments of a row in this entry
  uint32_t total_items;
  uint32_t first_task;    // tasks: CTAs full of units, or segments
  uint8_t code_width;     // bytes a code load may take: 16, 8, 4 to 1
  uint8_t store_width;    // bytes a store may take: 16, 8, 4, 2
};

constexpr int kListEntries = 48;

template <int N>
struct DequantizeArgs {
  TaskTable<DequantizeEntry, N> table;
  int block_shift;      // log2 of the block size (4-bit formats)
  bool wide;            // embedding: int64 indices
  const void* indices;  // embedding: row numbers of the entry, else null
  int64_t num_embeddings;
  Codebook codebook;
};
static_assert(sizeof(DequantizeArgs<kListEntries>) <= 4096, "kernel arguments of any driver");

struct Codes {
  uint32_t low, high;  // 8 nibbles in `low`, or 8 bytes
};

__device__ inline Codes load_codes(const uint8_t* source, bool four_bit, int count, int width) {
  if (count == kUnit) {
    if (four_bit && width >= 4) return {*reinterpret_cast<const uint32_t*>(source), 0};
    if (!four_bit && width >= 8) {
      const uint2 both = *reinterpret_cast<const uint2*>(source);
      return {both.x, both.y};
    }
  }
  uint32_t word[2] = {0, 0};
  const int bytes = four_bit ? (count + 1) / 2 : count;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < bytes) word[i / 4] |= uint32_t(source[i]) << (8 * (i % 4));
  }
  return {word[0], word[1]};
}

__device__ inline float load_float(const uint8_t* source, int width) {
  if (width >= 4) return *reinterpret_cast<const float*>(source);
  return bits_float(uint32_t(source[0]) | uint32_t(source[1]) << 8 | uint32_t(source[2]) << 16 | uint32_t(source[3]) << 24);
}

// What a code is multiplied with: absmax, or the row's quotient.
template <Scheme S>
__device__ inline float load_scale(const uint8_t* row, const DequantizeEntry& e, int block_shift, int64_t element) {
  const int width = e.code_width;
  const uint8_t* scales = row + e.scales_offset;
  if constexpr (S == Scheme::kInt8) {
    return div_rn(load_float(scales, width), kInt8Max);
  } else if constexpr (S == Scheme::kFP8) {
    return div_rn(load_float(scales, width), kFP8Max);
  } else {
    const int64_t block = element >> block_shift;
    if constexpr (S == Scheme::k4Bit) {
      return load_float(scales + 4 * block, width);
    } else {
      return fma_rn(float(row[e.code_bytes + block]), load_float(scales, width), load_float(scales + 4, width));
    }
  }
}

template <class T, int Width>
__device__ inline void store_unit_as(T* target, const T (&values)[kUnit]) {
  struct alignas(Width) Piece {
    T value[Width / sizeof(T)];
  };
  static_assert(sizeof(Piece) == Width);
  constexpr int kPerPiece = Width / int(sizeof(T));
#pragma unroll
  for (int p = 0; p < kUnit / kPerPiece; ++p) {
    Piece piece;
#pragma unroll
    for (int i = 0; i < kPerPiece; ++i) piece.value[i] = values[p * kPerPiece + i];
    reinterpret_cast<Piece*>(target)[p] = piece;
  }
}

template <class T>
__device__ inline void store_unit(T* target, const T (&values)[kUnit], int count, int width) {
  if (count == kUnit && width >= 16) {
    store_unit_as<T, 16>(target, values);
  } else if (count == kUnit && width == 8) {
    store_unit_as<T, 8>(target, values);
  } else if (count == kUnit && width == 4) {
    store_unit_as<T, 4>(target, values);
  } else {
#pragma unroll
    for (int i = 0; i < int(kUnit); ++i) {
      if (i < count) target[i] = values[i];
    }
  }
}

template <class T, Scheme S>
__device__ inline void decode_unit(const Codes& codes, float scale, const float* table, T (&values)[kUnit]) {
#pragma unroll
  for (int i = 0; i < int(kUnit); ++i) {
    float value;
    if constexpr (S == Scheme::k4Bit || S == Scheme::k4BitDQ) {
      // Element 2i is the high nibble of byte i.
      value = table[(codes.low >> (8 * (i / 2) + (i % 2 ? 0 : 4))) & 15u];
    } else {
      const uint32_t byte = ((i < 4 ? codes.low : codes.high) >> (8 * (i % 4))) & 0xFFu;
      value = S == Scheme::kInt8 ? float(int32_t(int8_t(byte))) : fp8_to_float(byte);
    }
    values[i] = from_float<T>(mul_rn(value, scale));
  }
}

template <bool Gather, int N>
__device__ inline int64_t source_row(const DequantizeArgs<N>& a, uint32_t row) {
  if constexpr (!Gather) return row;
  const int64_t index = a.wide ? static_cast<const int64_t*>(a.indices)[row]
                               : int64_t(static_cast<const int32_t*>(a.indices)[row]);
  HALFBYTE_DEVICE_ASSERT(index >= 0 && index < a.num_embeddings && "halfbyte::embedding: index out of range");
  return index;
}

// CTAs a multiprocessor that the unit kernel's registers are for: a list's need some for where it is.
template <int N>
constexpr int kResidentOf = N > 1 ? 5 : 6;

template <class T, Scheme S, bool Gather, int N>
__global__ void __launch_bounds__(kThreads, kResidentOf<N>) dequantize_kernel(const __grid_constant__ DequantizeArgs<N> a) {
  // 16 floats lie in 16 different banks: no lookup can conflict.
  __shared__ float table[16];
  if (threadIdx.x < 16) table[threadIdx.x] = a.codebook.value[threadIdx.x];
  __syncthreads();
  constexpr int kUnroll = kUnrollOf<Gather>;
  constexpr bool kFourBit = S == Scheme::k4Bit || S == Scheme::k4BitDQ;
  TaskCursor<TaskTable<DequantizeEntry, N>> cursor;
  // tasks and total_items < 2^31 and a CTA takes 1024 units at most: no 32-bit index wraps.
  for (uint32_t task = blockIdx.x; task < a.table.tasks; task += gridDim.x) {
    const DequantizeEntry& e = cursor.at(a.table, task);
    const uint32_t first = cursor.within(e, task) * (kThreads * kUnroll) + threadIdx.x;
    Codes codes[kUnroll];
    float scale[kUnroll];
    T* target[kUnroll];
    int count[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t unit = first + u * kThreads;
      count[u] = 0;
      if (unit < e.total_items) {
        const uint32_t row_index = e.items.quotient(unit);
        const int64_t element = (e.first_item + (unit - row_index * e.items.divisor)) * kUnit;
        const int64_t left = e.in_features - element;
        count[u] = left < kUnit ? int(left) : int(kUnit);
        const uint8_t* row = e.packed + source_row<Gather>(a, row_index) * e.row_bytes;
        codes[u] = load_codes(row + (kFourBit ? element / 2 : element), kFourBit, count[u], e.code_width);
        scale[u] = load_scale<S>(row, e, a.block_shift, element);
        target[u] = static_cast<T*>(e.output) + row_index * e.in_features + element;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (count[u] > 0) {
        T values[kUnit];
        decode_unit<T, S>(codes[u], scale[u], table, values);
        store_unit(target[u], values, count[u], e.store_width);
      }
    }
  }
}

// ---- whole segments ----

constexpr int kSegmentUnits = 4;                                // of a lane
constexpr int64_t kSegment = 32 * kSegmentUnits * kUnit;        // 1024 elements of one row
constexpr int64_t kSegmentMostColumns = (int64_t(1) << 31) - kSegment;  // columns are 32-bit there

// Whether all loads and stores of a tensor can be whole.
bool takes_segments(const DequantizeTensor& t, int64_t element_size) {
  const RowLayout& l = t.layout;
  return access_width(t.packed, l.row_bytes) >= 8 && access_width(t.output, l.in_features * element_size) >= 16 &&
         l.in_features % kUnit == 0 && l.in_features <= kSegmentMostColumns;
}

// Two neighbouring results as stored.
template <class T>
__device__ inline uint32_t pack(float low, float high) {
  static_assert(sizeof(T) == 2);
  uint32_t bits;
  if constexpr (std::is_same_v<T, BFloat16>) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    memcpy(&bits, &both, 4);
  } else {
    const __half2 both = __floats2half2_rn(low, high);
    memcpy(&bits, &both, 4);
  }
  return bits;
}

template <class T>
__device__ inline void store_values(T* target, const float (&v)[kUnit]) {
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint4*>(target) = make_uint4(pack<T>(v[0], v[1]), pack<T>(v[2], v[3]), pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
  } else {
    reinterpret_cast<float4*>(target)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4*>(target)[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}

// Values of a unit before the product. lane_value: codebook[lane % 16]; a shuffle takes the index modulo 32, and lanes 16 apart
// hold the same, so the bit above the nibble needs no mask.
template <Scheme S>
__device__ inline void code_values(const Codes& codes, float lane_value, float (&v)[kUnit]) {
#pragma unroll
  for (int i = 0; i < int(kUnit); ++i) {
    if constexpr (S == Scheme::k4Bit || S == Scheme::k4BitDQ) {
      v[i] = __shfl_sync(0xFFFFFFFFu, lane_value, int(codes.low >> (8 * (i / 2) + (i % 2 ? 0 : 4))));
    } else {
      const uint32_t byte = ((i < 4 ? codes.low : codes.high) >> (8 * (i % 4))) & 0xFFu;
      v[i] = S == Scheme::kInt8 ? float(int32_t(int8_t(byte))) : fp8_to_float(byte);
    }
  }
}

template <class T, Scheme S, bool Gather, int N>
__global__ void __launch_bounds__(kThreads, 5) dequantize_segments_kernel(const __grid_constant__ DequantizeArgs<N> a) {
  constexpr bool kFourBit = S == Scheme::k4Bit || S == Scheme::k4BitDQ;
  constexpr int kCodeBytes = kFourBit ? 4 : 8, kStride = 32 * int(kUnit);
  const uint32_t lane = threadIdx.x % 32;
  const float lane_value = a.codebook.value[lane % 16];
  TaskCursor<TaskTable<DequantizeEntry, N>> cursor;
  for (uint32_t task = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; task < a.table.tasks; task += gridDim.x * (kThreads / 32)) {
    const DequantizeEntry& e = cursor.at(a.table, task);
    const uint32_t segment = cursor.within(e, task), columns = uint32_t(e.in_features);
    const uint32_t row_index = e.items.quotient(segment);
    const uint32_t column = (segment - row_index * e.items.divisor) * uint32_t(kSegment) + lane * uint32_t(kUnit);
    const uint8_t* row = e.packed + source_row<Gather>(a, row_index) * e.row_bytes;
    const uint8_t* source = row + (kFourBit ? column / 2 : column);
    const uint8_t* scales = row + e.scales_offset;
    float step = 0.0f, low = 0.0f, quotient = 0.0f;
    if constexpr (S == Scheme::k4BitDQ) {
      step = reinterpret_cast<const float*>(scales)[0];
      low = reinterpret_cast<const float*>(scales)[1];
    } else if constexpr (!kFourBit) {
      quotient = *reinterpret_cast<const float*>(scales);
    }
    Codes codes[kSegmentUnits];
    float scale[kSegmentUnits];
#pragma unroll
    for (int u = 0; u < kSegmentUnits; ++u) {
      codes[u] = {0, 0};
      scale[u] = 0.0f;
      if (column + u * kStride >= columns) continue;
      const uint8_t* p = source + u * 32 * kCodeBytes;
      if constexpr (kFourBit) {
        codes[u].low = *reinterpret_cast<const uint32_t*>(p);
        const uint32_t block = (column + u * kStride) >> a.block_shift;
        if constexpr (S == Scheme::k4Bit) {
          scale[u] = reinterpret_cast<const float*>(scales)[block];
        } else {
          scale[u] = float((row + e.code_bytes)[block]);
        }
      } else {
        const uint2 both = *reinterpret_cast<const uint2*>(p);
        codes[u] = {both.x, both.y};
      }
    }
    if constexpr (!kFourBit) quotient = div_rn(quotient, S == Scheme::kInt8 ? kInt8Max : kFP8Max);
    T* target = static_cast<T*>(e.output) + row_index * e.in_features + column;
#pragma unroll
    for (int u = 0; u < kSegmentUnits; ++u) {
      float v[kUnit];
      code_values<S>(codes[u], lane_value, v);  // every lane takes part in the shuffles
      const float factor = S == Scheme::k4Bit ? scale[u] : S == Scheme::k4BitDQ ? fma_rn(scale[u], step, low) : quotient;
#pragma unroll
      for (int i = 0; i < int(kUnit); ++i) v[i] = mul_rn(v[i], factor);
      if (column + u * kStride < columns) store_values(target + u * kStride, v);
    }
  }
}

template <int N>
using Kernel = void (*)(DequantizeArgs<N>);

template <class T, Scheme S, bool Gather, int N>
Kernel<N> kernel_for(bool segments) {
  return segments ? dequantize_segments_kernel<T, S, Gather, N> : dequantize_kernel<T, S, Gather, N>;
}

template <class T, bool Gather, int N>
Kernel<N> kernel_for(int32_t format, bool segments) {
  if (format == kInt8) return kernel_for<T, Scheme::kInt8, Gather, N>(segments);
  if (format == kFP8) return kernel_for<T, Scheme::kFP8, Gather, N>(segments);
  return is_double_quantized(format) ? kernel_for<T, Scheme::k4BitDQ, Gather, N>(segments)
                                     : kernel_for<T, Scheme::k4Bit, Gather, N>(segments);
}

template <bool Gather, int N>
Kernel<N> kernel_for(int32_t format, DType dtype, bool segments) {
  switch (dtype) {
    case DType::kFloat32: return kernel_for<float, Gather, N>(format, segments);
    case DType::kBFloat16: return kernel_for<BFloat16, Gather, N>(format, segments);
    default: return kernel_for<Float16, Gather, N>(format, segments);
  }
}

struct Gathered {
  const void* indices;
  bool wide;
  int64_t num_embeddings;
};

// The tensors that one of the two kernels takes, N a launch; they share format, block size and dtype.
template <bool Gather, int N>
cudaError_t launch_tensors(const DequantizeTensor* tensors, size_t count, bool segments, const Gathered& gathered, DType dtype,
                           cudaStream_t stream) {
  constexpr uint32_t kUnits = kThreads * kUnrollOf<Gather>;
  const int64_t element_size = dtype == DType::kFloat32 ? 4 : 2;
  const RowLayout& common = tensors[0].layout;
  DequantizeArgs<N> args{};
  for (int i = 0; i < 16; ++i) args.codebook.value[i] = codebook(common.format)[i];
  if (is_4bit(common.format)) args.block_shift = log2_of(common.block_size);
  args.wide = gathered.wide;
  args.indices = gathered.indices;
  args.num_embeddings = gathered.num_embeddings;
  const Kernel<N> kernel = kernel_for<Gather, N>(common.format, dtype, segments);
  const unsigned most = unsigned(multiprocessors()) * 16, per_block = segments ? kThreads / 32 : 1;
  const auto launch_table = [&](const TaskTable<DequantizeEntry, N>& table) {
    args.table = table;
    const unsigned needed = (table.tasks + per_block - 1) / per_block;
    return launch(kernel, needed < most ? needed : most, 1, kThreads, 0, stream, args);
  };
  TableLauncher<TaskTable<DequantizeEntry, N>, decltype(launch_table)> tables(launch_table);
  for (size_t i = 0; i < count; ++i) {
    const DequantizeTensor& t = tensors[i];
    if (takes_segments(t, element_size) != segments) continue;
    const RowLayout& l = t.layout;
    const int64_t items = segments ? (l.in_features + kSegment - 1) / kSegment : units_of(l.in_features);
    const int failed = for_each_tile(t.rows, items, [&](const Tile& tile) {
      DequantizeEntry e{};
      e.packed = t.packed + (Gather ? 0 : tile.first_row * l.row_bytes);
      e.output = static_cast<char*>(t.output) + tile.first_row * l.in_features * element_size;
      if (Gather) args.indices = static_cast<const char*>(gathered.indices) + tile.first_row * (gathered.wide ? 8 : 4);
      e.in_features = l.in_features, e.row_bytes = l.row_bytes, e.code_bytes = l.code_bytes, e.scales_offset = l.scales_offset;
      e.first_item = tile.first_item;
      e.items = FastDivisor(uint32_t(tile.items));
      e.total_items = uint32_t(tile.rows * tile.items);
      e.code_width = uint8_t(access_width(t.packed, l.row_bytes));
      e.store_width = uint8_t(access_width(t.output, l.in_features * element_size));
      const bool added = tables.add(e, segments ? e.total_items : (e.total_items + kUnits - 1) / kUnits);
      return added && (!Gather || int(tables.finish()) == 0) ? 0 : 1;  // the indices are the table's, not the entry's
    });
    if (failed) break;
  }
  return tables.finish();
}

}  // namespace

cudaError_t launch_dequantize(const DequantizeTensor* tensors, size_t count, DType dtype, cudaStream_t stream) {
  const int64_t element_size = dtype == DType::kFloat32 ? 4 : 2;
  for (const bool segments : {true, false}) {
    size_t taken = 0;
    for (size_t i = 0; i < count; ++i) taken += takes_segments(tensors[i], element_size) == segments;
    if (taken == 0) continue;
    const cudaError_t error = count == 1 ? launch_tensors<false, 1>(tensors, count, segments, {}, dtype, stream)
                                         : launch_tensors<false, kListEntries>(tensors, count, segments, {}, dtype, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_embedding(const void* indices, bool wide, int64_t count, const uint8_t* packed, int64_t num_embeddings,
                             const RowLayout& layout, DType dtype, void* output, cudaStream_t stream) {
  const DequantizeTensor rows{packed, count, layout, output};
  const bool segments = takes_segments(rows, dtype == DType::kFloat32 ? 4 : 2);
  return launch_tensors<true, 1>(&rows, 1, segments, {indices, wide, num_embeddings}, dtype, stream);
}

}  // namespace halfbyte::cuda
