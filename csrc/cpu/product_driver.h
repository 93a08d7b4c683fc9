// What the fronts of all products with packed rows share: sizes, a call's memory, and tokens that are prepared, block by block, before
// threads share out the rows of the weight.
#pragma once

#include <algorithm>
#include <optional>
#include <tuple>

#include "../operands.h"
#include "isa.h"
#include "output_memory.h"
#include "workspace.h"

namespace halfbyte::cpu {

inline Compute compute_for(DType dtype, const LinearKernels& table) {
  return dtype == DType::kBFloat16 && table.in(Compute::kBFloat16).any_tokens ? Compute::kBFloat16 : Compute::kFloat32;
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

inline int64_t parts_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

inline int64_t elements_per_unit(Compute compute) { return compute == Compute::kBFloat16 ? 2 : 1; }

// Bytes for `elements` in units of `compute`.
inline Tensor unit_buffer(const Tensor& like, int64_t elements, Compute compute) {
  return new_tensor(like, {elements * (4 / elements_per_unit(compute))}, ScalarType::Byte);
}

inline const char* at_row(const Tensor& t, int64_t row, int64_t row_elements) {
  return static_cast<const char*>(t.const_data_ptr()) + row * row_elements * int64_t(t.element_size());
}

// Rows a thread should get at least, by the multiply-adds of each: dividing less work costs more than it gains.
inline int64_t row_grain(int64_t work_per_row) { return 1 + (int64_t(1) << 17) / std::max<int64_t>(work_per_row, 1); }

template <class T>
inline const T* address(const std::optional<T>& value) {
  return value ? &*value : nullptr;
}

// body(block, first group, end group) for `blocks` times `groups` of columns, shared out over threads. The first threads get one group more
// where they do not divide evenly, and begin at the end: a last group may be half of one (K = 576).
template <class Body>
void parallel_groups(int64_t blocks, int64_t groups, int64_t grain, const Body& body) {
  const int64_t all = blocks * groups;
  parallel_rows(all, grain, [&](int64_t first, int64_t last) {
    for (int64_t work = all - last; work < all - first;) {
      const int64_t group = work % groups, group_end = std::min(groups, group + all - first - work);
      body(work / groups, group, group_end);
      work += group_end - group;
    }
  });
}

// body(first token, tokens, begin, end) for few tokens, kPassTokens at a time, and [row_begin, row_end). Of more passes all take `block`
// rows before the next ones: their codes come from memory once.
template <class Body>
void by_passes(int64_t tokens, int64_t row_begin, int64_t row_end, int64_t block, const Body& body) {
  const int64_t step = tokens <= kPassTokens ? row_end - row_begin : block;
  for (int64_t row = row_begin; row < row_end; row += step)
    for (int64_t m = 0; m < tokens; m += kPassTokens) body(m, std::min(tokens - m, kPassTokens), row, std::min(row + step, row_end));
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

// Rows in whole blocks of `block_rows`, `grain` blocks at least for a thread.
template <class Body>
inline void parallel_blocks(int64_t rows, int64_t block_rows, int64_t grain, const Body& body) {
  parallel_rows(parts_of(rows, block_rows), grain,
                [&](int64_t begin, int64_t end) { body(begin * block_rows, std::min(end * block_rows, rows)); });
}

// Bytes of units that a thread prepares for itself alone, in its scratch: 256 tokens of K = 1536 in fp32. Larger blocks are better shared.
constexpr int64_t kOwnBytes = int64_t(3) << 19;
inline bool own_blocks_fit(int64_t own_bytes, int64_t scratch_bytes) {
  return own_bytes <= kOwnBytes && own_bytes + scratch_bytes <= kWorkspaceLimit;
}

// Threads that take blocks of tokens of their own through all of a weight, or 1: all of them share out every block, by rows or columns of
// the weight. On its own, a thread waits for nobody and reads the tokens that it prepared itself; but it decodes all of the weight.
struct TokenBlocks {
  int64_t threads;
  int64_t tokens;  // of each block but the last
};

// How blocks of tokens are multiplied, and what that takes beside products.
struct BlockCosts {
  int64_t groups;   // of rows or columns of the weight, one thread's each: 5 (K = 576) are no even work for 2 threads
  bool in_turn;     // threads share out one block after the other, not the groups of all blocks
  double decoding;  // the weight, anew for each block: the products of so many tokens
  double sharing;   // waiting for tokens that other threads prepare, and reading them: a part of all products
};

// A 32nd, and of `width`, the rows or columns that each element of a token meets, `sharing_rows`.
inline double sharing_cost(int64_t sharing_rows, int64_t width) { return 1.0 / 32 + double(sharing_rows) / double(width); }

// Of the blocks of a multiple of `multiple`, and at most `most` tokens, those that take least time. fits(tokens) says whether a thread has
// room for a block of its own.
template <class Fits>
inline TokenBlocks token_blocks(int64_t tokens, int64_t most, int64_t multiple, const BlockCosts& costs, const Fits& fits) {
  const int64_t threads = torch::stable::get_num_threads(), fewest = parts_of(tokens, most);
  TokenBlocks best{};
  double least = 0;
  for (int64_t parts = fewest; parts <= fewest + threads && (parts == fewest || tokens / parts >= multiple); ++parts) {
    const int64_t block = round_up(parts_of(tokens, parts), multiple), blocks = parts_of(tokens, block);
    const bool alone = threads > 1 && blocks % threads == 0 && fits(block);
    const bool in_turn = costs.in_turn && !alone;
    const int64_t work = in_turn ? blocks * parts_of(costs.groups, threads) : parts_of(blocks * costs.groups, threads);
    const double time = double(work) * (double(std::min(block, tokens)) + costs.decoding) * (alone ? 1 : 1 + costs.sharing);
    if (parts == fewest || time < least) best = {alone ? threads : 1, block}, least = time;
  }
  return best;
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
  int64_t width() const { return round_up(std::min(tokens, blocks.tokens), kernels().linear.tile_tokens); }
  int64_t units_bytes() const { return width() * token_bytes; }
  // What a thread leases.
  int64_t workspace() const { return scratch_bytes + (blocks.threads > 1 ? units_bytes() : 0); }
  ProductMemory memory() const { return {workspace(), blocks.threads > 1 ? 0 : units_bytes()}; }
};

// Its blocks, of whole vectors and tiles.
inline TokenBlocks tiled_blocks(int64_t tokens, int64_t rows, int64_t block_rows, int64_t token_bytes, int64_t scratch_bytes,
                                int32_t decoding_tokens, int32_t sharing_rows) {
  const BlockCosts costs{parts_of(rows, block_rows), true, double(decoding_tokens), sharing_cost(sharing_rows, rows)};
  return token_blocks(tokens, kLinearTokens, 32, costs, [&](int64_t block) {
    return own_blocks_fit(round_up(block, kernels().linear.tile_tokens) * token_bytes, scratch_bytes);
  });
}

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
  const auto granules_of = [&](const TokenBlock& b) { return parts_of(b.count, p.granule_tokens); };
  if (threads > 1) {
    const int64_t blocks = parts_of(p.tokens, tokens), parts = std::min(threads, blocks);
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

}  // namespace halfbyte::cpu
