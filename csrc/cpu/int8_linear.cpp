// Front of int8_linear on the CPU: quantize the activations by the int8 rule, then integer kernels on both sides' codes.
#include "int8_linear_kernels.h"
#include "product_driver.h"

namespace halfbyte::cpu {
namespace {

// Tokens for `direct`, from their quantized rows: they take the same rows of the weight in turn, which come from memory once.
class DirectTokens {
 public:
  // Prepared in `codes`, token_bytes each, which the caller keeps.
  DirectTokens(const uint8_t* rows, int64_t tokens, const RowLayout& layout, void* codes)
      : layout_(layout), tokens_(tokens), codes_(static_cast<const char*>(codes)) {
    table_.prepare_direct(rows, tokens, layout, codes, sums_, factors_);
  }
  static int64_t token_bytes(const RowLayout& layout) {
    return round_up(layout.in_features, kernels().int8_linear.direct_step) * kernels().int8_linear.direct_bytes;
  }
  void multiply(const uint8_t* packed, int64_t row_begin, int64_t row_end, const LinearOutput& output) const {
    // 8 rows where L1 keeps those for the next pass, beside the tokens, and would not keep 16.
    constexpr int64_t kRoom = int64_t(14) << 10;
    const int64_t block = 16 * layout_.row_bytes > kRoom && 8 * layout_.row_bytes <= kRoom ? 8 : 16;
    const int64_t passes = (tokens_ + kPassTokens - 1) / kPassTokens;
    by_passes(tokens_, row_begin, row_end, block, [&](int64_t m, int64_t tokens, int64_t row, int64_t end) {
      table_.direct(packed, row, end, layout_, codes_ + m * token_bytes(layout_), sums_ + m, factors_ + m, tokens,
                    {m / kPassTokens, passes}, output.from(m, 0));
    });
  }

 private:
  const Int8LinearKernels& table_ = kernels().int8_linear;
  const RowLayout& layout_;
  const int64_t tokens_;
  const char* const codes_;
  int32_t sums_[kMostDirectTokens];
  float factors_[kMostDirectTokens];
};

// How `tokens` (not 0) are split: up to direct_tokens go straight from the packed rows, of more whole vectors go through panels, and the
// last ones, which would fill little of one, straight.
struct Int8Split {
  int64_t whole, rest;

  explicit Int8Split(int64_t tokens) {
    const Int8LinearKernels& table = kernels().int8_linear;
    const int64_t part = tokens % kernels().linear.lanes;
    rest = tokens <= table.direct_tokens ? tokens : part <= table.rest_tokens ? part : 0;
    whole = tokens - rest;
  }
};

// Quantized tokens and, behind them, what DirectTokens prepares of them.
int64_t direct_tokens_bytes(int64_t count, const RowLayout& layout) {
  return round_up(count * layout.row_bytes, 64) + count * DirectTokens::token_bytes(layout);
}

// Of a token in panels, without its factor.
int64_t unit_bytes(const RowLayout& layout) {
  const Int8LinearKernels& table = kernels().int8_linear;
  return 4 * round_up((layout.in_features + table.unit_elements - 1) / table.unit_elements, table.unit_multiple);
}

TiledProduct int8_tiled_product(int64_t whole, int64_t rows, const RowLayout& layout) {
  const LinearKernels& shared = kernels().linear;
  const Int8LinearKernels& table = kernels().int8_linear;
  const int64_t K = layout.in_features, lanes = shared.lanes, token_bytes = unit_bytes(layout) + 4;  // with its factor
  const int64_t quantized_bytes = lanes * layout.row_bytes + 64;                                     // prepare_tiled reads past the rows
  const int64_t scratch_bytes = std::max(shared.scratch_bytes, quantized_bytes);
  return {whole, rows, K, token_bytes, lanes, 4 * K * lanes, table.block_rows, scratch_bytes,
          tiled_blocks(whole, rows, table.block_rows, token_bytes, scratch_bytes, table.decoding_tokens, table.sharing_rows)};
}

struct Int8Product {
  const Tensor& x;  // (tokens, K), contiguous
  int64_t tokens;
  const uint8_t* packed;
  int64_t rows;
  const RowLayout& layout;
  DType dtype;
  LinearOutput target;

  // Tokens from `first` on -> their rows.
  void quantize(int64_t first, int64_t count, uint8_t* out) const {
    kernels().quantize_rows(at_row(x, first, layout.in_features), dtype, nullptr, count, layout, out);
  }
  // The last `count` tokens, prepared in `memory`.
  DirectTokens last_tokens(int64_t count, void* memory) const {
    auto* const rows = static_cast<uint8_t*>(memory);
    const int64_t first = tokens - count;
    parallel_rows(count, row_grain(4 * layout.in_features),
                  [&](int64_t begin, int64_t end) { quantize(first + begin, end - begin, rows + begin * layout.row_bytes); });
    return DirectTokens(rows, count, layout, rows + round_up(count * layout.row_bytes, 64));
  }
};

// body(begin, end) for [row_begin, row_end), `step` rows at a time.
template <class Body>
void by_steps(int64_t row_begin, int64_t row_end, int64_t step, const Body& body) {
  for (int64_t row = row_begin; row < row_end; row += step) body(row, std::min(row + step, row_end));
}

// Few tokens, straight from the packed rows.
void multiply_rows(const Int8Product& p) {
  const CallScratch scratch(p.x, direct_tokens_bytes(p.tokens, p.layout));
  const DirectTokens direct = p.last_tokens(p.tokens, scratch.data());
  parallel_rows(p.rows, row_grain(p.layout.in_features * p.tokens),
                [&](int64_t begin, int64_t end) { direct.multiply(p.packed, begin, end, p.target); });
}

// Whole vectors of tokens through panels, and the rest beside them.
void multiply_panels(const Int8Product& p, const Int8Split& split) {
  const Int8LinearKernels& table = kernels().int8_linear;
  const int64_t lanes = kernels().linear.lanes, whole = split.whole;
  std::optional<Tensor> memory;
  std::optional<DirectTokens> direct;
  if (split.rest != 0) {
    memory = new_tensor(p.x, {direct_tokens_bytes(split.rest, p.layout)}, ScalarType::Byte);
    direct.emplace(p.last_tokens(split.rest, memory->mutable_data_ptr()));
  }
  const TiledProduct tiled = int8_tiled_product(whole, p.rows, p.layout);
  const int64_t factors_at = tiled.width() * unit_bytes(p.layout);
  const auto factors_in = [&](void* units) { return reinterpret_cast<float*>(static_cast<char*>(units) + factors_at); };
  const auto prepare = [&](const TokenBlock& b, int64_t begin, int64_t end, void* units, void* scratch) {
    auto* const rows = static_cast<uint8_t*>(scratch);
    by_steps(begin * lanes, std::min(end * lanes, b.count), lanes, [&](int64_t m, int64_t end_token) {
      p.quantize(b.first + m, end_token - m, rows);
      table.prepare_tiled(rows, m, b.count, p.layout, units, factors_in(units));
    });
  };
  run_tiled(tiled, p.x, prepare, [&](const TokenBlock& b, int64_t begin, int64_t end, void* units, void* scratch) {
    const bool with_rest = direct && b.first + b.count == whole;
    by_steps(begin, end, with_rest ? table.panel_rows : p.rows, [&](int64_t row, int64_t row_end) {
      table.tiled(p.packed, row, row_end, p.layout, units, factors_in(units), b.count, p.target.from(b.first, 0), scratch);
      if (with_rest) direct->multiply(p.packed, row, row_end, p.target.from(whole, 0));
    });
  });
}

Tensor int8_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t in_features) {
  constexpr const char* op = "int8_linear";
  const RowLayout layout = checked_int8_linear(op, input, packed, bias, in_features);
  const int64_t N = packed.size(0), tokens = leading_numel(input);
  const NoGradGuard no_grad;
  std::optional<Tensor> added;
  if (bias) added = as_contiguous(*bias);
  const Tensor x = as_contiguous(input), weight = as_contiguous(packed);
  Tensor output = new_buffer(x, with_last_size(input, N), x.scalar_type());
  if (N == 0 || tokens == 0) return output;
  const DType dtype = checked_dtype(op, "input", x.scalar_type());
  const Int8Product product{x, tokens, weight.const_data_ptr<uint8_t>(), N, layout, dtype,
                            {output.mutable_data_ptr(), added ? added->const_data_ptr() : nullptr, N, dtype}};
  const Int8Split split(tokens);
  if (split.whole == 0) multiply_rows(product);
  else multiply_panels(product, split);
  return output;
}

std::tuple<int64_t, int64_t> int8_linear_memory(int64_t tokens, int64_t rows, int64_t in_features) {
  const RowLayout layout = checked_plan("int8_linear_memory", tokens, rows, 0, kInt8, 0, in_features);
  if (tokens == 0 || rows == 0) return {0, 0};
  const Int8Split split(tokens);
  if (split.whole == 0) return CallScratch::memory(direct_tokens_bytes(tokens, layout)).both();
  ProductMemory memory = int8_tiled_product(split.whole, rows, layout).memory();
  if (split.rest != 0) memory.temporary += direct_tokens_bytes(split.rest, layout);
  return memory.both();
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) { halfbyte::impl_both(m, "int8_linear", TORCH_BOX(&halfbyte::cpu::int8_linear)); }

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CompositeExplicitAutograd, m) {
  m.impl("int8_linear_memory", TORCH_BOX(&halfbyte::cpu::int8_linear_memory));
}
