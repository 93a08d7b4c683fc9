// Front of int8_linear on the CPU: quantize the activations by the int8 rule, then integer kernels on both sides' codes.
#include "int8_linear_kernels.h"
#include "linear_driver.h"

namespace halfbyte::cpu {
namespace {

void quantize_tokens(const char* x, DType dtype, int64_t tokens, const RowLayout& layout, uint8_t* rows) {
  const int64_t row = layout.in_features * (dtype == DType::kFloat32 ? 4 : 2);
  parallel_rows(tokens, row_grain(4 * layout.in_features), [&](int64_t begin, int64_t end) {
    kernels().quantize_rows(x + begin * row, dtype, nullptr, end - begin, layout, rows + begin * layout.row_bytes);
  });
}

// Tokens for `direct`, from their quantized rows: they take the same rows of the weight in turn, which come from memory once.
class DirectTokens {
 public:
  DirectTokens(const Tensor& like, const uint8_t* rows, int64_t tokens, const RowLayout& layout)
      : layout_(layout),
        tokens_(tokens),
        token_bytes_(round_up(layout.in_features, table_.direct_step) * table_.direct_bytes),
        codes_(new_tensor(like, {tokens * token_bytes_}, ScalarType::Byte)) {
    table_.prepare_direct(rows, tokens, layout, codes_.mutable_data_ptr(), sums_, factors_);
  }
  void multiply(const uint8_t* packed, int64_t row_begin, int64_t row_end, const LinearOutput& output) const {
    for (int64_t m = 0; m < tokens_; m += kPassTokens)
      table_.direct(packed, row_begin, row_end, layout_, static_cast<const char*>(codes_.const_data_ptr()) + m * token_bytes_,
                    sums_ + m, factors_ + m, std::min(tokens_ - m, kPassTokens), output.from(m, 0));
  }

 private:
  const Int8LinearKernels& table_ = kernels().int8_linear;
  const RowLayout& layout_;
  int64_t tokens_, token_bytes_;
  Tensor codes_;
  int32_t sums_[kMostDirectTokens];
  float factors_[kMostDirectTokens];
};

// body(begin, end) for [row_begin, row_end), `step` rows at a time.
template <class Body>
void by_steps(int64_t row_begin, int64_t row_end, int64_t step, const Body& body) {
  for (int64_t row = row_begin; row < row_end; row += step) body(row, std::min(row + step, row_end));
}

Tensor int8_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t in_features) {
  constexpr const char* op = "int8_linear";
  const RowLayout layout = checked_int8_linear(op, input, packed, bias, in_features);
  const int64_t N = packed.size(0), tokens = leading_numel(input), K = in_features;
  const NoGradGuard no_grad;
  std::optional<Tensor> added;
  if (bias) added = as_contiguous(*bias);
  const Tensor x = as_contiguous(input), weight = as_contiguous(packed);
  Tensor output = new_buffer(x, with_last_size(input, N), x.scalar_type());
  if (N == 0 || tokens == 0) return output;
  const DType dtype = checked_dtype(op, "input", x.scalar_type());
  const LinearKernels& shared = kernels().linear;
  const Int8LinearKernels& table = kernels().int8_linear;
  const auto* codes = weight.const_data_ptr<uint8_t>();
  const int64_t most = std::min(tokens, kLinearTokens);
  Tensor buffer = new_tensor(x, {most * layout.row_bytes}, ScalarType::Byte);
  auto* rows = buffer.mutable_data_ptr<uint8_t>();
  const LinearOutput target{output.mutable_data_ptr(), added ? added->const_data_ptr() : nullptr, N, dtype};
  // Whole vectors of tokens go through panels, and a rest that would fill little of one does not.
  const int64_t part = tokens % shared.lanes;
  const int64_t rest = tokens <= table.direct_tokens ? tokens : part <= table.rest_tokens ? part : 0, whole = tokens - rest;
  std::optional<DirectTokens> direct;
  if (rest != 0) {
    quantize_tokens(at_row(x, whole, K), dtype, rest, layout, rows);
    direct.emplace(x, rows, rest, layout);
  }
  if (whole == 0) {
    constexpr int64_t kPassRows = 16;
    parallel_rows(N, row_grain(K), [&](int64_t begin, int64_t end) {
      by_steps(begin, end, rest <= kPassTokens ? N : kPassRows,
               [&](int64_t row, int64_t row_end) { direct->multiply(codes, row, row_end, target); });
    });
    return output;
  }
  const int64_t units_of_row = round_up((K + table.unit_elements - 1) / table.unit_elements, table.unit_multiple);
  Tensor units = new_tensor(x, {round_up(most, shared.tile_tokens) * units_of_row * 4}, ScalarType::Byte);
  Tensor factors = new_tensor(x, {most}, ScalarType::Float);
  void* prepared = units.mutable_data_ptr();
  float* token_factors = factors.mutable_data_ptr<float>();
  for (int64_t m = 0; m < whole; m += kLinearTokens) {
    const int64_t count = std::min(whole - m, kLinearTokens);
    quantize_tokens(at_row(x, m, K), dtype, count, layout, rows);
    parallel_rows((count + shared.tile_tokens - 1) / shared.tile_tokens, row_grain(K * shared.tile_tokens),
                  [&](int64_t begin, int64_t end) {
                    table.prepare_tiled(rows, count, layout, begin, end, prepared, token_factors);
                  });
    const bool with_rest = rest != 0 && m + count == whole;
    parallel_blocks(N, table.block_rows, row_grain(K * count), [&](int64_t begin, int64_t end) {
      const WorkspaceLease scratch(shared.scratch_bytes);
      by_steps(begin, end, with_rest ? table.panel_rows : N, [&](int64_t row, int64_t row_end) {
        table.tiled(codes, row, row_end, layout, prepared, token_factors, count, target.from(m, 0), scratch.data());
        if (with_rest) direct->multiply(codes, row, row_end, target.from(whole, 0));
      });
    });
  }
  return output;
}

}  // namespace
}  // namespace halfbyte::cpu

STABLE_TORCH_LIBRARY_IMPL(halfbyte, CPU, m) { m.impl("int8_linear", TORCH_BOX(&halfbyte::cpu::int8_linear)); }
