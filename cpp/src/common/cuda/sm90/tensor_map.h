// TMA descriptors of ragged tensors: boxes that end where a sequence ends, without a descriptor for each sequence.
//
// A box may only be clipped at the end of a tensor dimension, and here every sequence ends somewhere else. So the rows
// get three dimensions with coordinates (x, y, z), all of whose addresses add up:
//     x, stride s,            bound 2^30:  x = 2^30 - length + row   (past the sequence's end x is out of bounds)
//     y, stride s:                         y = begin + length
//     z, stride 2^34 - s:                  z = 2^30
// x + y alone would be 2^30 rows too far; z takes that back, its 2^64 elements being nothing to 64-bit addresses:
//     s (2^30 - length + row) + s (begin + length) + 2^30 (2^34 - s) = s (begin + row) + 2^64.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/host_device.h"

namespace ragged_attention::sm90 {

constexpr std::int32_t kRaggedWrap = 1 << 30;

RAGGED_ATTENTION_HOST_DEVICE std::int32_t ragged_row(std::int32_t length, std::int32_t row) {
  return kRaggedWrap - length + row;
}
RAGGED_ATTENTION_HOST_DEVICE std::int32_t ragged_end(std::int32_t begin, std::int32_t length) { return begin + length; }

// A [rows, heads, head_dim] tensor of 16-bit elements in boxes of 64 columns x `box_rows` rows of one head, with the
// 128-byte swizzle. Strides in elements.
struct RaggedBoxes {
  std::int64_t row_stride = 0, head_stride = 0;
  std::int32_t heads = 0, head_dim = 0, box_rows = 0;
  bool is_bfloat16 = false;

  bool operator==(const RaggedBoxes& other) const {
    return row_stride == other.row_stride && head_stride == other.head_stride && heads == other.heads &&
           head_dim == other.head_dim && box_rows == other.box_rows && is_bfloat16 == other.is_bfloat16;
  }
};

// Whether TMA can walk it: base and strides on 16 bytes, strides positive and not too long.
bool tma_takes(const void* data, const RaggedBoxes& boxes);

// Its descriptor. Throws CudaError where the driver refuses.
void encode_ragged(CUtensorMap* map, const void* data, const RaggedBoxes& boxes);

}  // namespace ragged_attention::sm90
