// Grouped-query attention over the tokens that a QSA selection names, in a paged KV cache.
#pragma once

#include <cstdint>
#include <optional>

#include "ragged_attention/tensor_view.h"

namespace ragged_attention {

struct QsaSparseAttentionArguments {
  TensorView q;                  // [total_q, num_q_heads, head_dim]
  TensorView input_row_offsets;  // [batch + 1], uint32, int32 or int64
  TensorView kv_blocks;          // [num_pages, 2, num_layers, page_size, num_kv_heads, head_dim]; 0 = K, 1 = V
  TensorView cache_lengths;      // [batch], uint32, int32 or int64: keys cached before this step
  TensorView kv_lookup_table;    // [batch, max_pages], uint32, int32 or int64
  std::int64_t layer_idx = 0;
  TensorView token_indices;                       // [total_q, selection_width], int32
  TensorView counts;                              // [total_q], int32
  TensorView out;                                 // [total_q, num_q_heads, head_dim]; float32, float16 or bfloat16
  std::optional<TensorView> lse;                  // [total_q, num_q_heads], float32
  std::int64_t page_stride = -1;                  // elements from page to page; -1: kv_blocks' own strides
  std::optional<double> scale;                    // head_dim ** -0.5 when absent
  std::optional<std::int64_t> max_prompt_length;  // hints; no result depends on them
  std::optional<std::int64_t> max_cache_length;
  std::optional<std::int64_t> group;   // if given, num_q_heads / num_kv_heads
  std::optional<std::int64_t> warps;   // CUDA: force the row-by-row kernel with this many warps a CTA
  std::optional<std::int64_t> unroll;  // CUDA: force the row-by-row kernel with this many keys in flight a warp
  void* stream = nullptr;              // CUDA stream handle; null is the legacy default stream
  bool check_values = false;           // read the device's values and raise on a bad one; synchronises
};

// Checks everything the host can see, then enqueues the work on `stream` (CUDA) or does it (CPU).
void qsa_sparse_attention(const QsaSparseAttentionArguments& arguments);

// The checks alone: of shapes, dtypes and parameters that a compiler knows before there is memory.
void check_qsa_sparse_attention(const QsaSparseAttentionArguments& arguments);

}  // namespace ragged_attention
