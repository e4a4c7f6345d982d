// The six masks, each as one interval of keys per query row.
//
// In a sequence of length n, query i sees the keys j with lo(i) <= j < hi(i). Both bounds are monotone in i, so a block
// of rows [i0, i1) sees nothing outside [lo(i0), hi(i1 - 1)), and every row of it sees all of [lo(i1 - 1), hi(i0)).
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace ragged_attention {

enum class MaskKind : std::int32_t {
  kNull,                    // all keys
  kCausal,                  // j <= i
  kSlidingWindowCausal,     // i - W + 1 <= j <= i
  kSlidingWindowNoncausal,  // j >= i - W + 1
  kChunked,                 // i // W == j // W
  kChunkedCausal,           // i // W == j // W and j <= i
};

struct Mask {
  MaskKind kind = MaskKind::kCausal;
  std::int64_t window = -1;  // W; -1 for the masks without one

  RAGGED_ATTENTION_HOST_DEVICE bool is_causal() const {
    return kind == MaskKind::kCausal || kind == MaskKind::kSlidingWindowCausal || kind == MaskKind::kChunkedCausal;
  }

  // First visible key of row i in a sequence of length n. Needs 0 <= i < n; a window past n is the same as n.
  template <typename Int>
  RAGGED_ATTENTION_HOST_DEVICE Int lo(Int i, Int n) const {
    const Int w = window < static_cast<std::int64_t>(n) ? static_cast<Int>(window) : n;
    switch (kind) {
      case MaskKind::kSlidingWindowCausal:
      case MaskKind::kSlidingWindowNoncausal:
        return i >= w ? i - w + 1 : Int{0};
      case MaskKind::kChunked:
      case MaskKind::kChunkedCausal:
        return i - i % w;
      default:
        return Int{0};
    }
  }

  // One past the last visible key of row i.
  template <typename Int>
  RAGGED_ATTENTION_HOST_DEVICE Int hi(Int i, Int n) const {
    const Int w = window < static_cast<std::int64_t>(n) ? static_cast<Int>(window) : n;
    switch (kind) {
      case MaskKind::kCausal:
      case MaskKind::kSlidingWindowCausal:
      case MaskKind::kChunkedCausal:
        return i + 1;
      case MaskKind::kChunked: {
        const Int start = i - i % w;
        return start < n - w ? start + w : n;  // written so that start + w cannot overflow
      }
      default:
        return n;
    }
  }
};

}  // namespace ragged_attention
