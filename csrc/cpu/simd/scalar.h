// Conversions between element types and float: IEEE exact, round to nearest even, no torch, no STL.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../../formats.h"

namespace halfbyte::cpu {
namespace {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline bool is_finite(float value) { return (float_bits(value) & 0x7F800000u) != 0x7F800000u; }

// Element types as stored. Distinct types, so that templates can tell bf16 from fp16.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// |value| in the type's own bits: ordered like the values, Inf and NaN above every finite one. value_of goes back.
inline uint32_t magnitude_bits(float value) { return float_bits(value) & 0x7FFFFFFFu; }
inline uint32_t magnitude_bits(BFloat16 value) { return value.bits & 0x7FFFu; }
inline uint32_t magnitude_bits(Float16 value) { return value.bits & 0x7FFFu; }

template <class T>
inline T value_of(uint32_t bits) {
  return T{uint16_t(bits)};
}
template <>
inline float value_of<float>(uint32_t bits) {
  return bits_float(bits);
}

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return bits_float(uint32_t(value.bits) << 16); }
inline float to_float(Float16 value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return bits_float(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));  // Inf, NaN
  if (magnitude >= 0x0400u) return bits_float(sign | ((magnitude << 13) + 0x38000000u));           // rebias 15 -> 127
  return bits_float(sign | float_bits(float(magnitude) * 0x1p-24f));                               // subnormal, exact
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}
template <>
inline BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {uint16_t((bits >> 16) | 0x40u)};  // NaN stays NaN, quiet
  return {uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
inline Float16 from_float<Float16>(float value) {
  const uint32_t bits = float_bits(value);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {uint16_t(sign | 0x7E00u)};
  if (magnitude >= 0x477FF000u) return {uint16_t(sign | 0x7C00u)};  // 65520 and above round to infinity
  if (magnitude >= 0x38800000u) {                                     // normal: 2^-14 and above
    const uint32_t rounded = magnitude + 0x0FFFu + ((magnitude >> 13) & 1u);
    return {uint16_t(sign | ((rounded - 0x38000000u) >> 13))};
  }
  // Subnormal: adding 0.5 puts the result's last bit at the sum's last bit (2^-24), rounded by the addition itself.
  const float sum = bits_float(magnitude) + 0.5f;
  return {uint16_t(sign | (float_bits(sum) - 0x3F000000u))};
}

// What from_float makes of a NaN, in a float's bits: those that stay, and those that are set.
template <class T>
constexpr uint32_t kNaNKept = 0xFFFF0000u;
template <class T>
constexpr uint32_t kNaNSet = 0x00400000u;
template <>
inline constexpr uint32_t kNaNKept<Float16> = 0x80000000u;
template <>
inline constexpr uint32_t kNaNSet<Float16> = 0x7FC00000u;

// e4m3fn, saturating, nearest even. NaN never gets here: blocks that hold one are written without encoding.
inline uint8_t float_to_fp8(float value) {
  const uint32_t bits = float_bits(value);
  const uint8_t sign = uint8_t((bits >> 24) & 0x80u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude >= 0x43E00000u) return uint8_t(sign | 0x7Eu);  // 448 and above
  if (magnitude >= 0x3C800000u) {                               // normal: 2^-6 and above
    const uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
    const uint32_t code = (rounded - 0x3C000000u) >> 20;  // rebias 127 -> 7
    return uint8_t(sign | (code > 0x7Eu ? 0x7Eu : code));
  }
  // Subnormal: the sum's last bit is worth 2^-9, the smallest e4m3fn step.
  const float sum = bits_float(magnitude) + 0x1p14f;
  return uint8_t(sign | (float_bits(sum) - float_bits(0x1p14f)));
}

inline float fp8_to_float(uint8_t code) {
  const uint32_t sign = uint32_t(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7Fu;
  if (magnitude == 0x7Fu) return bits_float(sign | kNaNBits);
  if (magnitude >= 8u) return bits_float(sign | ((magnitude << 20) + 0x3C000000u));
  return bits_float(sign | float_bits(float(magnitude) * 0x1p-9f));
}

#if !defined(__AVX2__)
// Plain C++ has no stores past the caches (simd/stream.h for the ISAs that do).
constexpr int64_t kStreamAlignment = 1;
inline void stream_copy(void* target, const void* source, int64_t bytes) { memcpy(target, source, size_t(bytes)); }
inline void stream_fence() {}
#endif

}  // namespace
}  // namespace halfbyte::cpu
