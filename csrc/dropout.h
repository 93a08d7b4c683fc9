// Masks of dropout: bit c % 8 of byte c / 8 of row m is set where element (m, c) is kept. What bits past the last column are means
// nothing.
//
// Byte b, counted over all rows, has the 16-bit numbers of one Philox block (counter b, the seed that is given): an element is kept
// where its number is at least dropped_of(p). The same on every device.
#pragma once

#include "philox.h"

namespace halfbyte {
namespace {

inline constexpr uint32_t kDropoutStep = 0;  // optimizers count from 1

constexpr int64_t mask_bytes(int64_t columns) { return (columns + 7) / 8; }

// How many of 65536 equally probable numbers drop an element.
constexpr uint32_t dropped_of(double p) { return uint32_t(p * 65536.0 + 0.5); }

}  // namespace
}  // namespace halfbyte
