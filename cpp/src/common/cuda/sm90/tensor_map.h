// TMA descriptors of ragged tensors; ragged_coordinates.h says how their boxes end where a sequence ends.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/cuda/sm90/ragged_coordinates.h"

namespace ragged_attention::sm90 {

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
