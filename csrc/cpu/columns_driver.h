// Products whose tokens are prepared row by row and meet columns of a weight, or its rows, turned: of linear's backward, and its forward
// of many tokens.
#pragma once

#include <utility>

#include "product_driver.h"

namespace halfbyte::cpu {

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
  // Asked once, where the call begins: to a worker that it has just started, torch may say 1.
  int64_t threads = torch::stable::get_num_threads();

  int64_t blocks() const { return (source.tokens + block - 1) / block; }
  int64_t own_bytes() const { return source.own_bytes(block) + (low ? low->own_bytes(block) : 0); }
  // Whether every thread has whole blocks, for which it waits for none, and prepares them itself.
  bool alone() const { return threads > 1 && blocks() % threads == 0 && own_blocks_fit(own_bytes(), scratch_bytes); }
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
    const int64_t threads = p.threads;
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
  parallel_groups(blocks, groups, grain, [&](int64_t b, int64_t group, int64_t group_end) {
    const WorkspaceLease scratch(p.workspace());
    const int64_t token = b * block;
    multiply(token, group, group_end, at(prepared, source, token), p.low ? at(*prepared_low, *p.low, token) : TokenUnits{},
             scratch.data());
  });
}

}  // namespace halfbyte::cpu
