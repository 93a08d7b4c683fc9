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

// All of `g`, block after block: that of `token` is stride * token units behind the first.
inline Tensor prepare_matrix(const TokenMatrix& g, int64_t tokens, int64_t block) {
  if (g.ready()) return *g.matrix;
  const int64_t together = kernels().linear.in(g.compute).matrix_tokens;
  Tensor units = new_buffer(*g.matrix, {g.bytes(tokens)}, ScalarType::Byte);
  auto* out = static_cast<char*>(units.mutable_data_ptr());
  const int64_t strips = block / together, all = parts_of(tokens, together);
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
  TokenBlocks blocks;     // threads that take blocks alone have as many each
  int64_t groups;
  int64_t group_work;     // of a block and a group, as row_grain's work
  int64_t scratch_bytes;  // of a thread, beside units of its own

  bool alone() const { return blocks.threads > 1; }
  int64_t own_bytes(int64_t tokens) const { return source.own_bytes(tokens) + (low ? low->own_bytes(tokens) : 0); }
  // What a thread leases.
  int64_t workspace() const { return scratch_bytes + (alone() ? own_bytes(blocks.tokens) : 0); }
  ProductMemory memory() const { return {workspace(), alone() ? 0 : source.own_bytes(source.tokens)}; }
};

// Of tokens whose elements meet `width` columns or rows each. token_work: of a token and a group; scratch(tokens): bytes that a thread
// needs for a block.
template <class Scratch>
inline ColumnsProduct columns_product(const TokenMatrix& source, const std::optional<TokenMatrix>& low, int64_t groups, int64_t width,
                                      int64_t token_work, const Scratch& scratch) {
  const LinearArithmetic& arithmetic = kernels().linear.in(source.compute);
  ColumnsProduct p{source, low, {}, groups, 0, 0};
  const auto scratch_of = [&](int64_t block) { return scratch(std::min(source.tokens, block)); };
  const double sharing = source.ready() ? 0 : sharing_cost(arithmetic.sharing_rows, width);
  const BlockCosts costs{groups, false, double(arithmetic.column_decoding), sharing};
  constexpr int64_t kMultiple = 16;  // of every matrix_tokens
  p.blocks = token_blocks(source.tokens, arithmetic.column_tokens, kMultiple, costs,
                          [&](int64_t block) { return own_blocks_fit(p.own_bytes(block), scratch_of(block)); });
  p.group_work = token_work * p.blocks.tokens;
  p.scratch_bytes = scratch_of(p.blocks.tokens);
  return p;
}

// Runs it by multiply(first token, first group, end group, units of source, units of low, scratch).
template <class Multiply>
inline void run_columns(const ColumnsProduct& p, const Multiply& multiply) {
  const TokenMatrix& source = p.source;
  const int64_t tokens = source.tokens, block = p.blocks.tokens, blocks = parts_of(tokens, block), groups = p.groups;
  const int64_t grain = row_grain(p.group_work);
  if (p.alone()) {
    const int64_t threads = p.blocks.threads;
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
