// What a Hopper kernel of ragged_flash_attention is given.
#pragma once

#include "common/cuda/sm90/tensor_map.h"
#include "common/cuda/sm90/tickets.h"
#include "ragged_flash_attention/params.h"

namespace ragged_attention::sm90 {

struct RaggedKernelParams {
  CUtensorMap q, k, v, out;
  RaggedTensor q_rows, k_rows, v_rows;  // the same for loads without TMA
  void* out_data;
  std::int64_t out_row_stride, out_head_stride;
  float* lse;  // null when not wanted
  std::int64_t lse_row_stride, lse_head_stride;
  RaggedRows rows;
  Mask mask;
  float scale_log2;  // scale * log2(e), positive
  std::int32_t num_heads, group, head_dim;
  std::int32_t longer, longest, band, unit_heads;  // schedule.h
  TicketCounter* tickets;                          // null: units in a fixed order
};

}  // namespace ragged_attention::sm90
