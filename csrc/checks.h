// The only place that formats errors. std::invalid_argument arrives in Python as ValueError with our text alone
// (STD_TORCH_CHECK would give RuntimeError with a file:line prefix).
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

#include <torch/csrc/stable/tensor.h>

#include "formats.h"

namespace halfbyte {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// "halfbyte::<op>: <parts...>"
template <class... Parts>
[[noreturn]] [[gnu::cold]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << "halfbyte::" << op << ": ";
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

#define HALFBYTE_CHECK(condition, op, ...)                     \
  do {                                                         \
    if (!(condition)) [[unlikely]] ::halfbyte::fail(op, __VA_ARGS__); \
  } while (0)

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Bool: return "bool";
    default: return "an unsupported dtype";
  }
}

inline std::string shape_text(const Tensor& t) {
  std::ostringstream text;
  text << '(';
  for (int64_t i = 0; i < t.dim(); ++i) text << (i ? ", " : "") << t.size(i);
  text << (t.dim() == 1 ? ",)" : ")");
  return text.str();
}

// How an error names a tensor: an argument, or an entry of a list.
struct Operand {
  const char* name;
  int64_t index = -1;
  Operand(const char* argument) : name(argument) {}  // NOLINT: an argument's name stands for it
  Operand(const char* list, size_t i) : name(list), index(int64_t(i)) {}
};
inline std::ostream& operator<<(std::ostream& text, const Operand& operand) {
  text << operand.name;
  if (operand.index >= 0) text << '[' << operand.index << ']';
  return text;
}

inline DType checked_dtype(const char* op, const Operand& argument, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Half: return DType::kFloat16;
    default: fail(op, argument, " must be float32, bfloat16 or float16, got ", dtype_name(dtype));
  }
}

inline RowLayout checked_layout(const char* op, int64_t format, int64_t block_size, int64_t in_features,
                                const Operand& name = "in_features") {
  HALFBYTE_CHECK(format >= 0 && format < kNumFormats, op, "format must be an id from 0 to ", kNumFormats - 1, ", got ", format);
  if (is_4bit(int32_t(format))) {
    HALFBYTE_CHECK(block_size >= 32 && block_size <= 4096 && (block_size & (block_size - 1)) == 0, op,
                   "block_size must be a power of two from 32 to 4096 for ", kFormatNames[format], ", got ", block_size);
  } else {
    HALFBYTE_CHECK(block_size == 0, op, "block_size must be 0 for ", kFormatNames[format],
                   " (one scale per row), got ", block_size);
  }
  // 2^40 elements a row is far beyond any tensor and keeps every product below 2^63.
  HALFBYTE_CHECK(in_features >= 1 && in_features <= (int64_t(1) << 40), op,
                 name, " must be from 1 to 2^40, got ", in_features);
  return row_layout(int32_t(format), block_size, in_features);
}

// packed: uint8 with rows of layout.row_bytes in its last dimension, any number of leading dimensions >= min_dim - 1.
inline void check_packed(const char* op, const Tensor& packed, const RowLayout& layout, int64_t min_dim = 2,
                         const Operand& name = "packed") {
  HALFBYTE_CHECK(packed.scalar_type() == ScalarType::Byte, op, name, " must be uint8, got ", dtype_name(packed.scalar_type()));
  HALFBYTE_CHECK(packed.dim() >= min_dim, op, name, " must have at least ", min_dim, " dimensions, got shape ", shape_text(packed));
  const int64_t got = packed.size(packed.dim() - 1);
  HALFBYTE_CHECK(got == layout.row_bytes, op, name, " must have ", layout.row_bytes, " bytes per row for ",
                 kFormatNames[layout.format], " with in_features=", layout.in_features, ", got ", got,
                 "; was it quantized with another format?");
}

inline void check_same_device(const char* op, const Operand& name_a, const Tensor& a, const Operand& name_b, const Tensor& b) {
  HALFBYTE_CHECK(a.device() == b.device(), op, name_a, " and ", name_b, " must be on the same device, got ",
                 a.is_cpu() ? "cpu" : "another device", " and ", b.is_cpu() ? "cpu" : "another device");
}

}  // namespace halfbyte
