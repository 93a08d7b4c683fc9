// What the fronts of linear and lora_linear share: prepare the activations once, split the output over threads.
//
// bf16 inputs multiply in bf16 pairs where the CPU has them and they pay (weights rounded to bf16, as in a dense bf16 layer), a few
// of them 4-bit codes as int16 with AVX2 (errors an eighth of that); everything else, fp16 and bf16 on older CPUs included, multiplies
// exact fp32 weights. Sums are fp32, in an order that depends neither on the number of threads nor on how the work is split.
#pragma once

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "../operands.h"
#include "isa.h"
#include "output_memory.h"
#include "workspace.h"

namespace halfbyte::cpu {

inline Compute compute_for(DType dtype, const LinearKernels& table) {
  return dtype == DType::kBFloat16 && table.in(Compute::kBFloat16).any_tokens ? Compute::kBFloat16 : Compute::kFloat32;
}

inline Compute forward_compute(DType dtype, int64_t tokens, int32_t format, const LinearKernels& table) {
  if (dtype == DType::kBFloat16 && is_4bit(format) && tokens <= table.in(Compute::kInt16).direct_tokens) return Compute::kInt16;
  return tokens <= table.exact_tokens ? Compute::kFloat32 : compute_for(dtype, table);
}

// The sizes of a product, which decide how it is computed. Tokens and rows are not 0.
struct ProductSizes {
  int64_t tokens, rows;
  const RowLayout& layout;
  DType dtype;
  Compute compute;

  // Of a prepared token whose features are whole groups.
  int64_t token_bytes() const { return round_up(layout.in_features, kernels().linear.group) * (compute == Compute::kBFloat16 ? 2 : 4); }
};

// Bytes that a product takes beside its operands and its result, but for a low-rank part.
struct ProductMemory {
  int64_t kept;       // scratch of one thread, at most, which it keeps
  int64_t temporary;  // of the call
  std::tuple<int64_t, int64_t> both() const { return {kept, temporary}; }
};

inline int64_t elements_per_unit(Compute compute) { return compute == Compute::kBFloat16 ? 2 : 1; }

// Bytes for `elements` in units of `compute`.
inline Tensor unit_buffer(const Tensor& like, int64_t elements, Compute compute) {
  return new_tensor(like, {elements * (4 / elements_per_unit(compute))}, ScalarType::Byte);
}

inline const char* at_row(const Tensor& t, int64_t row, int64_t row_elements) {
  return static_cast<const char*>(t.const_data_ptr()) + row * row_elements * int64_t(t.element_size());
}

// Rows a thread should get at least: dividing less work costs more than it gains.
inline int64_t row_grain(int64_t work_per_row) { return 1 + (int64_t(1) << 16) / std::max<int64_t>(work_per_row, 1); }

// Rows in whole blocks of `block_rows`, `grain` blocks at least for a thread.
template <class Body>
inline void parallel_blocks(int64_t rows, int64_t block_rows, int64_t grain, const Body& body) {
  parallel_rows((rows + block_rows - 1) / block_rows, grain,
                [&](int64_t begin, int64_t end) { body(begin * block_rows, std::min(end * block_rows, rows)); });
}

// Bytes of units that a thread prepares for itself alone, in its scratch: 256 tokens of K = 1536 in fp32. Larger blocks are better shared.
constexpr int64_t kOwnBytes = int64_t(3) << 19;
inline bool own_blocks_fit(int64_t own_bytes, int64_t scratch_bytes) {
  return own_bytes <= kOwnBytes && own_bytes + scratch_bytes <= kWorkspaceLimit;
}

// Threads of the forward that take blocks of tokens of their own through all rows, or 1: all of them share the rows for one block after
// the other. On its own, a thread waits for nobody and reads the activations that it prepared itself; but it decodes all of the weight.
struct TokenBlocks {
  int64_t threads;
  int64_t tokens;  // of each block but the last
};

// What `tiled` takes beside products, in those of so many tokens with all rows.
struct TiledCosts {
  double decoding;     // all rows
  double sharing;      // waiting for what other threads have prepared, and reading it: a part of all products,
  double waiting = 0;  // and so many more
};

inline TokenBlocks token_blocks(int64_t tokens, int64_t token_bytes, const TiledCosts& costs) {
  const auto parts = [](int64_t of, int64_t size) { return (of + size - 1) / size; };
  constexpr int64_t kMultiple = 32;  // of whole vectors and tiles
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t rounds = parts(tokens, kLinearTokens * threads), block = round_up(parts(tokens, rounds * threads), kMultiple);
  const double alone = double(rounds) * (double(block) + costs.decoding);
  const double together = (double(tokens) + double(parts(tokens, kLinearTokens)) * costs.decoding) / double(threads);
  const bool fit = own_blocks_fit(block * token_bytes, kernels().linear.scratch_bytes);
  if (threads > 1 && fit && alone <= together * (1 + costs.sharing) + costs.waiting) return {threads, block};
  return {1, std::min(tokens, kLinearTokens)};
}

// A product whose tokens are prepared into units, block by block, before rows of the weight, decoded into panels, meet them.
struct TiledProduct {
  int64_t tokens, rows, in_features;
  int64_t token_bytes;     // of a prepared token
  int64_t granule_tokens;  // tokens that are prepared together,
  int64_t granule_work;    // and what that takes, as row_grain's work
  int64_t block_rows;      // of the micro-kernel
  int64_t scratch_bytes;   // of a thread, beside units of its own
  TokenBlocks blocks;

  // Tokens that a buffer of units has room for.
  int64_t width() const { return round_up(blocks.tokens, kernels().linear.tile_tokens); }
  int64_t units_bytes() const { return width() * token_bytes; }
  // What a thread leases.
  int64_t workspace() const { return scratch_bytes + (blocks.threads > 1 ? units_bytes() : 0); }
  ProductMemory memory() const { return {workspace(), blocks.threads > 1 ? 0 : units_bytes()}; }
};

struct TokenBlock {
  int64_t first, count;
  int64_t thread;  // less than TokenBlocks::threads; no other thread has this number meanwhile
};

// Runs it by
//   prepare(block, begin, end, units, scratch)          granules [begin, end) of a block's tokens -> its units
//   multiply(block, row_begin, row_end, units, scratch) these rows times all of a block's tokens
// Shared units are in memory made as `like` is.
template <class Prepare, class Multiply>
inline void run_tiled(const TiledProduct& p, const Tensor& like, const Prepare& prepare, const Multiply& multiply) {
  const int64_t threads = p.blocks.threads, tokens = p.blocks.tokens;
  const auto block_from = [&](int64_t m, int64_t thread) { return TokenBlock{m, std::min(p.tokens - m, tokens), thread}; };
  const auto granules_of = [&](const TokenBlock& b) { return (b.count + p.granule_tokens - 1) / p.granule_tokens; };
  if (threads > 1) {
    const int64_t blocks = (p.tokens + tokens - 1) / tokens, parts = std::min(threads, blocks);
    parallel_rows(parts, row_grain(tokens * p.rows * p.in_features), [&](int64_t first, int64_t last) {
      // Units in the thread's own scratch: in new memory they would mostly be in another core's caches.
      const WorkspaceLease own(p.workspace());
      char* const units = static_cast<char*>(own.data()) + p.scratch_bytes;
      for (int64_t b = first * blocks / parts; b < last * blocks / parts; ++b) {
        const TokenBlock block = block_from(b * tokens, first);
        prepare(block, 0, granules_of(block), units, own.data());
        multiply(block, 0, p.rows, units, own.data());
      }
    });
    return;
  }
  const Tensor prepared = new_tensor(like, {p.units_bytes()}, ScalarType::Byte);
  void* const units = prepared.mutable_data_ptr();
  for (int64_t m = 0; m < p.tokens; m += tokens) {
    const TokenBlock block = block_from(m, 0);
    parallel_rows(granules_of(block), row_grain(p.granule_work), [&](int64_t begin, int64_t end) {
      const WorkspaceLease scratch(p.workspace());
      prepare(block, begin, end, units, scratch.data());
    });
    parallel_blocks(p.rows, p.block_rows, row_grain(p.in_features * block.count), [&](int64_t begin, int64_t end) {
      const WorkspaceLease scratch(p.workspace());
      multiply(block, begin, end, units, scratch.data());
    });
  }
}

// The low-rank part of a forward product. weight (N, rank) holds one block per group of rows: rows of group g multiply
// columns [g * rank, (g + 1) * rank) of input (M, groups * rank).
struct LowRankOperands {
  const Tensor& weight;  // contiguous, of one of the three dtypes
  const Tensor& input;   // likewise
  const std::vector<int64_t>& groups;  // rows of each; adds up to N
  float factor;
};

// `low`'s weight in units, block by block: (N + kMostTileRows, units of all groups), zeros outside the blocks.
inline Tensor low_rank_weight(const LowRankOperands& low, Compute compute, int64_t stride) {
  const LinearKernels& table = kernels().linear;
  const int64_t N = low.weight.size(0), rank = low.weight.size(1);
  Tensor units = unit_buffer(low.weight, (N + kMostTileRows) * stride * elements_per_unit(compute), compute);
  torch::stable::zero_(units);
  char* out = static_cast<char*>(units.mutable_data_ptr());
  int64_t first = 0;
  for (size_t g = 0; g < low.groups.size(); first += low.groups[g++])
    table.prepare_low_rank(at_row(low.weight, first, rank), checked_dtype("lora_linear", "lora_B", low.weight.scalar_type()),
                           low.groups[g], rank, 1.0f, compute, int64_t(g) * rank, stride, out + first * stride * 4);
  return units;
}

// output = x @ packed^T + bias (of `target`) + the low-rank part. x (tokens, K) of dtype, contiguous.
struct Forward : ProductSizes {
  const Tensor& x;
  const uint8_t* packed;
  const LowRankOperands* low;
  LinearOutput target;
};

// The low-rank part as the kernels take it, if there is one: its weight in units, and memory for the input of `tokens` tokens.
struct LowRankUnits {
  int64_t rank = 0, stride = 0;
  DType dtype{};
  std::optional<Tensor> weight, input;

  // Rows of a multiple of so many units.
  LowRankUnits(const Forward& f, int64_t tokens, int64_t multiple) {
    if (!f.low) return;
    const int64_t elements = elements_per_unit(f.compute);
    rank = f.low->input.size(f.low->input.dim() - 1);
    stride = round_up((rank + elements - 1) / elements, multiple);
    dtype = checked_dtype("lora_linear", "projected", f.low->input.scalar_type());
    weight = low_rank_weight(*f.low, f.compute, stride);
    input = unit_buffer(f.x, tokens * stride * elements, f.compute);
  }
  // The input of all tokens, token after token.
  void prepare(const Forward& f) const {
    if (!f.low) return;
    std::memset(input_at(0), 0, size_t(f.tokens * stride * 4));
    kernels().linear.prepare_low_rank(f.low->input.const_data_ptr(), dtype, f.tokens, rank, f.low->factor, f.compute, 0, stride,
                                      input_at(0));
  }
  void* input_at(int64_t token) const { return static_cast<char*>(input->mutable_data_ptr()) + token * stride * 4; }
  // Of tokens from `token` on.
  std::optional<LowRank> addend(int64_t token) const {
    if (!weight) return std::nullopt;
    return LowRank{weight->const_data_ptr(), input_at(token), true, rank, stride};
  }
};

template <class T>
inline const T* address(const std::optional<T>& value) {
  return value ? &*value : nullptr;
}

// Memory that all threads of a call share, if it fits the calling thread's own scratch there: an allocation less (1.5 us). For kernels
// that take no scratch themselves.
class CallScratch {
 public:
  CallScratch(const Tensor& like, int64_t bytes) {
    if (memory(bytes).kept == bytes) kept_.emplace(bytes);
    else fresh_ = new_tensor(like, {bytes}, ScalarType::Byte);
  }
  static ProductMemory memory(int64_t bytes) {
    return bytes <= kWorkspaceLimit ? ProductMemory{bytes, 0} : ProductMemory{0, bytes};
  }
  void* data() const { return kept_ ? kept_->data() : fresh_->mutable_data_ptr(); }

 private:
  std::optional<WorkspaceLease> kept_;
  std::optional<Tensor> fresh_;
};

// Rows that all of few tokens take, kPassTokens at a time, before the next ones: their codes come from memory once.
constexpr int64_t kPassRows = 16;

// Few tokens, each row decoded in registers.
inline void forward_direct(const Forward& f) {
  const LinearKernels& table = kernels().linear;
  const int64_t K = f.layout.in_features, token_bytes = f.token_bytes();
  const CallScratch scratch(f.x, f.tokens * token_bytes);
  char* const units = static_cast<char*>(scratch.data());
  const LowRankUnits low(f, f.tokens, table.lanes);
  for (int64_t m = 0; m < f.tokens; m += kPassTokens)
    table.prepare_direct(at_row(f.x, m, K), f.dtype, std::min(f.tokens - m, kPassTokens), f.layout, f.compute, units + m * token_bytes);
  low.prepare(f);
  parallel_rows(f.rows, row_grain(K), [&](int64_t begin, int64_t end) {
    const int64_t step = f.tokens <= kPassTokens ? end - begin : kPassRows;
    for (int64_t row = begin; row < end; row += step) {
      for (int64_t m = 0; m < f.tokens; m += kPassTokens) {
        const auto addend = low.addend(m);
        table.direct(f.packed, row, std::min(row + step, end), f.layout, f.compute, units + m * token_bytes,
                     std::min(f.tokens - m, kPassTokens), address(addend), f.target.from(m, 0));
      }
    }
  });
}

inline TiledProduct tiled_product(const ProductSizes& f) {
  const LinearKernels& table = kernels().linear;
  const LinearArithmetic& arithmetic = table.in(f.compute);
  const int64_t K = f.layout.in_features, token_bytes = f.token_bytes();
  return {f.tokens, f.rows, K, token_bytes, table.tile_tokens, K * table.tile_tokens, arithmetic.block_rows, table.scratch_bytes,
          token_blocks(f.tokens, token_bytes, {double(arithmetic.decoding_tokens), 1.0 / 16})};
}

// More tokens, rows decoded into panels.
inline void forward_tiled(const Forward& f) {
  const LinearKernels& table = kernels().linear;
  const int64_t K = f.layout.in_features;
  const TiledProduct p = tiled_product(f);
  const LowRankUnits low(f, p.blocks.threads * p.width(), table.lanes);
  const auto prepare = [&](const TokenBlock& b, int64_t begin, int64_t end, void* units, void*) {
    table.prepare_tiled(at_row(f.x, b.first, K), f.dtype, b.count, f.layout, f.compute, begin, end, units);
    if (f.low && begin == 0)
      table.prepare_low_rank_tiled(at_row(f.low->input, b.first, low.rank), low.dtype, b.count, low.rank, f.low->factor, f.compute,
                                   low.input_at(b.thread * p.width()));
  };
  run_tiled(p, f.x, prepare, [&](const TokenBlock& b, int64_t begin, int64_t end, const void* units, void* scratch) {
    const auto addend = low.addend(b.thread * p.width());
    table.tiled(f.packed, begin, end, f.layout, f.compute, units, b.count, address(addend), f.target.from(b.first, 0), scratch);
  });
}

// A matrix (tokens, columns) that meets panels of columns: activations, gradients, or a low-rank input.
struct TokenMatrix {
  const Tensor* matrix;  // null in a plan, which takes it to be aligned as torch's allocator aligns
  DType dtype;
  int64_t tokens, columns, stride;  // stride: units of each token, prepared
  Compute compute;

  TokenMatrix(const Tensor* matrix, DType dtype, int64_t tokens, int64_t columns, Compute compute)
      : matrix(matrix), dtype(dtype), tokens(tokens), columns(columns), compute(compute) {
    const int64_t elements = elements_per_unit(compute);
    stride = round_up((columns + elements - 1) / elements, kernels().linear.in(compute).matrix_units);
  }
  // Whether kernels take the matrix as it lies.
  bool ready() const {
    const LinearArithmetic& a = kernels().linear.in(compute);
    if (dtype != (compute == Compute::kBFloat16 ? DType::kBFloat16 : DType::kFloat32)) return false;
    const void* const data = matrix ? matrix->const_data_ptr() : nullptr;
    return stride % a.packed_units != 0 && columns == stride * elements_per_unit(compute) && tokens % a.matrix_tokens == 0 &&
           reinterpret_cast<uintptr_t>(data) % uintptr_t(4 * a.matrix_units) == 0;
  }
  int64_t bytes(int64_t tokens) const { return round_up(tokens, kernels().linear.in(compute).matrix_tokens) * stride * 4; }
  // What a thread needs to prepare so many for itself.
  int64_t own_bytes(int64_t tokens) const { return ready() ? 0 : bytes(tokens); }
  // Tokens [begin, end) of the block of `count` from `token` on -> the block's units.
  void prepare(int64_t token, int64_t count, int64_t begin, int64_t end, void* units) const {
    kernels().linear.prepare_matrix(at_row(*matrix, token, columns), dtype, count, columns, compute, begin, end, units);
  }
  // The block's units, prepared in `own` if they are not ready.
  TokenUnits prepared(int64_t token, int64_t count, void* own) const {
    if (ready()) return {at_row(*matrix, token, columns), true};
    prepare(token, count, 0, count, own);
    return {own, false};
  }
};

// Tokens of a block of the backward or of turned weights, which threads share out by blocks and groups of columns: 5 groups (K = 576) are
// no even work for 2 threads, and none at all for most of 16, nor are 600 tokens as 512 and 88. Every block decodes anew, which takes as
// long as multiplying kDecodingTokens tokens. Blocks that threads prepare for themselves save them a sixteenth, as in token_blocks.
inline int64_t column_block(const TokenMatrix& source, int64_t groups) {
  constexpr int64_t kDecodingTokens = 16, kMultiple = 16;  // of every matrix_tokens
  const int64_t tokens = source.tokens, threads = torch::stable::get_num_threads();
  const int64_t most = kernels().linear.in(source.compute).column_tokens, fewest = (tokens + most - 1) / most;
  int64_t best = 0, least = 0;
  for (int64_t parts = fewest; parts <= fewest + threads && (parts == fewest || tokens / parts >= kMultiple); ++parts) {
    const int64_t block = round_up((tokens + parts - 1) / parts, kMultiple);
    const int64_t blocks = (tokens + block - 1) / block, work = blocks * groups, prepared = source.own_bytes(block);
    const bool alone = prepared > 0 && prepared <= kOwnBytes && threads > 1 && blocks % threads == 0;
    const int64_t time = (work + threads - 1) / threads * (std::min(block, tokens) + kDecodingTokens) * (alone ? 16 : 17);
    if (parts == fewest || time < least) best = block, least = time;
  }
  return best;
}

// All of `g`, block after block: that of `token` is stride * token units behind the first.
inline Tensor prepare_matrix(const TokenMatrix& g, int64_t tokens, int64_t block) {
  if (g.ready()) return *g.matrix;
  const int64_t together = kernels().linear.in(g.compute).matrix_tokens;
  Tensor units = new_buffer(*g.matrix, {g.bytes(tokens)}, ScalarType::Byte);
  auto* out = static_cast<char*>(units.mutable_data_ptr());
  const int64_t strips = block / together, all = (tokens + together - 1) / together;
  parallel_rows(all, row_grain(g.columns * together), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const int64_t token = at / strips * block, last = std::min(end, (at / strips + 1) * strips);
      const int64_t count = std::min(tokens - token, block);
      g.prepare(token, count, at * together - token, std::min(last * together - token, count), out + token * g.stride * 4);
      at = last;
    }
  });
  return units;
}

// A product whose tokens, prepared row by row, meet groups of decoded columns or turned rows: blocks of tokens of `source`, and of `low`
// if there is one, times groups, shared out over threads.
struct ColumnsProduct {
  TokenMatrix source;
  std::optional<TokenMatrix> low;
  int64_t block, groups;
  int64_t group_work;     // of a block and a group, as row_grain's work
  int64_t scratch_bytes;  // of a thread, beside units of its own

  int64_t blocks() const { return (source.tokens + block - 1) / block; }
  int64_t own_bytes() const { return source.own_bytes(block) + (low ? low->own_bytes(block) : 0); }
  // Whether every thread has whole blocks, for which it waits for none, and prepares them itself.
  bool alone() const {
    const int64_t threads = torch::stable::get_num_threads();
    return threads > 1 && blocks() % threads == 0 && own_blocks_fit(own_bytes(), scratch_bytes);
  }
  // What a thread leases.
  int64_t workspace() const { return scratch_bytes + (alone() ? own_bytes() : 0); }
  ProductMemory memory() const { return {workspace(), alone() ? 0 : source.own_bytes(source.tokens)}; }
};

// Runs it by multiply(first token, first group, end group, units of source, units of low, scratch).
template <class Multiply>
inline void run_columns(const ColumnsProduct& p, const Multiply& multiply) {
  const TokenMatrix& source = p.source;
  const int64_t tokens = source.tokens, block = p.block, blocks = p.blocks(), groups = p.groups, grain = row_grain(p.group_work);
  if (p.alone()) {
    const int64_t threads = torch::stable::get_num_threads();
    parallel_rows(threads, (grain * threads + groups * blocks - 1) / (groups * blocks), [&](int64_t first, int64_t last) {
      const WorkspaceLease own(p.workspace());
      char* const units = static_cast<char*>(own.data()) + p.scratch_bytes;
      for (int64_t b = first * blocks / threads; b < last * blocks / threads; ++b) {
        const int64_t token = b * block, count = std::min(tokens - token, block);
        const TokenUnits low_units = p.low ? p.low->prepared(token, count, units + source.own_bytes(block)) : TokenUnits{};
        multiply(token, 0, groups, source.prepared(token, count, units), low_units, own.data());
      }
    });
    return;
  }
  const Tensor prepared = prepare_matrix(source, tokens, block);
  std::optional<Tensor> prepared_low;
  if (p.low) prepared_low = prepare_matrix(*p.low, tokens, block);
  const auto at = [](const Tensor& units, const TokenMatrix& g, int64_t token) {
    return TokenUnits{static_cast<const char*>(units.const_data_ptr()) + token * g.stride * 4, g.ready()};
  };
  parallel_rows(blocks * groups, grain, [&](int64_t begin, int64_t end) {
    const WorkspaceLease scratch(p.workspace());
    for (int64_t work = begin; work < end;) {
      const int64_t group = work % groups, group_end = std::min(groups, group + end - work), token = work / groups * block;
      multiply(token, group, group_end, at(prepared, source, token), p.low ? at(*prepared_low, *p.low, token) : TokenUnits{},
               scratch.data());
      work += group_end - group;
    }
  });
}

inline ColumnsProduct turned_product(const ProductSizes& f, const Tensor* x) {
  const LinearKernels& table = kernels().linear;
  const int64_t K = f.layout.in_features, run = table.in(f.compute).turned_rows, groups = (f.rows + run - 1) / run;
  const TokenMatrix source(x, f.dtype, f.tokens, K, f.compute);
  const int64_t block = column_block(source, groups);
  return {source, std::nullopt, block, groups, K * run * block, table.turned_scratch(f.compute, std::min(f.tokens, block), f.rows, K)};
}

// Many tokens, or some of a layer with few rows: weights are turned.
inline void forward_turned(const Forward& f) {
  const LinearKernels& table = kernels().linear;
  const int64_t run = table.in(f.compute).turned_rows;
  const ColumnsProduct p = turned_product(f, &f.x);
  const LowRankUnits low(f, round_up(f.tokens, table.in(f.compute).matrix_tokens), table.in(f.compute).matrix_units);
  low.prepare(f);
  run_columns(p, [&](int64_t token, int64_t group, int64_t group_end, const TokenUnits& units, const TokenUnits&, void* scratch) {
    const auto addend = low.addend(token);
    table.turned(f.packed, group * run, std::min(group_end * run, f.rows), f.layout, f.compute, units,
                 std::min(f.tokens - token, p.block), address(addend), f.target.from(token, 0), scratch);
  });
}

// Preparing a token for `tiled`, and turning its sums, take as long as some 13 rows' products; turning a weight as long as that of some
// tokens. Tokens that have to be widened to fp32 are prepared either way. `tiled` multiplies whole vectors of tokens, `turned` whole runs
// of rows.
inline bool turned_is_faster(const ProductSizes& f) {
  const LinearKernels& table = kernels().linear;
  const LinearArithmetic& arithmetic = table.in(f.compute);
  const auto padding = [](int64_t n, int64_t whole) { return round_up(n, whole) - n; };
  if (8 * padding(f.rows, arithmetic.turned_rows) > f.rows) return false;
  const TurnedFrom& from = arithmetic.turned_from;
  const bool as_they_lie = f.compute == Compute::kBFloat16 || f.dtype == DType::kFloat32;
  const int64_t rows = as_they_lie ? from.rows : from.widened_rows;  // of a token
  const bool enough = rows > 0 && f.tokens >= std::clamp<int64_t>(f.rows / rows, from.tokens, kLinearTokens);
  return enough || padding(f.tokens, table.lanes) >= from.padding;
}

enum class ForwardRoute { kDirect, kTiled, kTurned };

inline ForwardRoute forward_route(const ProductSizes& f) {
  if (f.tokens <= kernels().linear.in(f.compute).direct_tokens) return ForwardRoute::kDirect;
  return turned_is_faster(f) ? ForwardRoute::kTurned : ForwardRoute::kTiled;
}

inline ProductSizes forward_sizes(int64_t tokens, int64_t rows, const RowLayout& layout, DType dtype) {
  return {tokens, rows, layout, dtype, forward_compute(dtype, tokens, layout.format, kernels().linear)};
}

inline ProductMemory forward_memory(const ProductSizes& f) {
  switch (forward_route(f)) {
    case ForwardRoute::kDirect: return CallScratch::memory(f.tokens * f.token_bytes());
    case ForwardRoute::kTurned: return turned_product(f, nullptr).memory();
    case ForwardRoute::kTiled: return tiled_product(f).memory();
  }
  return {};
}

inline void run_forward(const Tensor& x, int64_t tokens, const uint8_t* packed, int64_t rows, const RowLayout& layout, DType dtype,
                        const LowRankOperands* low, LinearOutput target) {
  const Forward f{forward_sizes(tokens, rows, layout, dtype), x, packed, low, target};
  switch (forward_route(f)) {
    case ForwardRoute::kDirect: return forward_direct(f);
    case ForwardRoute::kTurned: return forward_turned(f);
    case ForwardRoute::kTiled: return forward_tiled(f);
  }
}

}  // namespace halfbyte::cpu
