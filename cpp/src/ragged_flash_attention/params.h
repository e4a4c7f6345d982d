// What a kernel of ragged_flash_attention is given: validated, and plain enough to pass by value to the device.
#pragma once

#include <cstdint>

#include "common/mask.h"
#include "common/ragged.h"
#include "ragged_attention/tensor_view.h"

namespace ragged_attention {

// A [rows, heads, head_dim] tensor with a contiguous last dimension. Strides are in elements.
struct RaggedTensor {
  const void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

struct RaggedParams {
  RaggedTensor q, k, v;
  void* out = nullptr;
  std::int64_t out_row_stride = 0;
  std::int64_t out_head_stride = 0;
  float* lse = nullptr;  // null when not wanted
  std::int64_t lse_row_stride = 0;
  std::int64_t lse_head_stride = 0;

  RaggedRows rows;  // shared by q, k and v
  DType dtype;      // of q, k, v and out: float32, float16 or bfloat16
  std::int32_t num_q_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim = 0;  // a multiple of 8, 8 to 256
  Mask mask;
  float scale = 1.0f;  // finite; may be 0 or negative
  // Rows of the longest sequence, if the caller is to be believed; -1 where he says nothing. For the order of launches.
  std::int64_t longest_hint = -1;

  RAGGED_ATTENTION_HOST_DEVICE std::int32_t group() const { return num_q_heads / num_kv_heads; }

  // There is something to write. (Without query heads there may be no kv heads either, and group() has no meaning.)
  bool has_output() const { return rows.total > 0 && num_q_heads > 0; }
};

// Runs on the calling thread and the library's pool; returns when `out` is written.
void ragged_flash_attention_cpu(const RaggedParams& params);

}  // namespace ragged_attention
