// The six masks as their definitions have them, pair by pair: what the intervals are tested against.
#pragma once

#include <cstdint>

#include "common/mask.h"

namespace ragged_attention {

constexpr MaskKind kMaskKinds[] = {
    MaskKind::kNull,    MaskKind::kCausal,       MaskKind::kSlidingWindowCausal, MaskKind::kSlidingWindowNoncausal,
    MaskKind::kChunked, MaskKind::kChunkedCausal};

inline bool has_window(MaskKind kind) { return kind != MaskKind::kNull && kind != MaskKind::kCausal; }

inline bool sees(const Mask& mask, std::int64_t i, std::int64_t j) {
  const std::int64_t w = mask.window;
  switch (mask.kind) {
    case MaskKind::kNull:
      return true;
    case MaskKind::kCausal:
      return j <= i;
    case MaskKind::kSlidingWindowCausal:
      return i - w + 1 <= j && j <= i;
    case MaskKind::kSlidingWindowNoncausal:
      return j >= i - w + 1;
    case MaskKind::kChunked:
      return i / w == j / w;
    case MaskKind::kChunkedCausal:
      return j <= i && i / w == j / w;
  }
  return false;
}

}  // namespace ragged_attention
