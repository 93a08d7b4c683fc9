// What error_feedback works on, shared by every device: raw pointers, no torch.
#pragma once

#include <cstdint>

namespace halfbyte {

// N = rows, K = elements of a row, B = blocks of a row, C = candidates. All contiguous.
struct FeedbackArgs {
  const float* weight;      // (N, K)
  const float* factor;      // (K, K) upper triangular; null: errors are not fed back
  const float* importance;  // (K,) weight of an element's squared error in the search
  const float* scales;      // (N, B) to use as they are; null: searched
  const float* candidates;  // (C,) multiples of a block's absmax to try, in this order
  int64_t num_candidates;
  float* targets;           // (N, K) what each element was when it was rounded
  float* chosen;            // (N, B)
};

// Columns whose errors reach the rest of the row together. The order of additions is the same for any number.
inline constexpr int64_t kFeedbackPanel = 64;

}  // namespace halfbyte
