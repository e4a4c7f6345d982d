// How TMA boxes of ragged tensors end where a sequence ends, without a descriptor for each sequence.
//
// A box may only be clipped at the end of a tensor dimension, and here every sequence ends somewhere else. So the rows
// get three dimensions with coordinates (x, y, z), all of whose addresses add up:
//     x, stride s,            bound 2^30:  x = 2^30 - length + row   (past the sequence's end x is out of bounds)
//     y, stride s:                         y = begin + length
//     z, stride 2^34 - s:                  z = 2^30
// x + y alone would be 2^30 rows too far; z takes that back, its 2^64 elements being nothing to 64-bit addresses:
//     s (2^30 - length + row) + s (begin + length) + 2^30 (2^34 - s) = s (begin + row) + 2^64.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace ragged_attention::sm90 {

constexpr std::int32_t kRaggedWrap = 1 << 30;
constexpr std::int64_t kRaggedSpan = std::int64_t{1} << 34;  // elements; more than any stride

RAGGED_ATTENTION_HOST_DEVICE std::int32_t ragged_row(std::int32_t length, std::int32_t row) {
  return kRaggedWrap - length + row;
}
RAGGED_ATTENTION_HOST_DEVICE std::int32_t ragged_end(std::int32_t begin, std::int32_t length) { return begin + length; }

}  // namespace ragged_attention::sm90
