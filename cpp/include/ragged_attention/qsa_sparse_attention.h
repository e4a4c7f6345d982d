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

// The same over one layer of a cache as serving engines keep it: K and V are tensors of their own, and a row may list
// every token that the pages of its sequence reach. The names are those of vLLM's qsa_sparse_paged_attention.
struct QsaSparsePagedAttentionArguments {
  TensorView q;                // [total_q, num_q_heads, head_dim]
  TensorView k_cache;          // [num_pages, page_size, num_kv_heads, head_dim]
  TensorView v_cache;          // like k_cache, with its strides
  TensorView logical_indices;  // [total_q, selection_width + 1], int32: a row's list, and in the last column its count
  TensorView block_table;      // [batch, max_pages], uint32, int32 or int64
  // The sequence of each row: row by row, or as ranges of rows, for the kernels that let neighbours share what they
  // gather. With both, the ranges count.
  std::optional<TensorView> token_to_req;     // [total_q], int32; outside [0, batch): no sequence
  std::optional<TensorView> query_start_loc;  // [batch + 1], uint32, int32 or int64
  std::optional<TensorView> seq_lens;         // [batch], with query_start_loc: where a sequence's tokens end
  TensorView out;                             // [total_q, num_q_heads, head_dim]; float32, float16 or bfloat16
  std::optional<double> scale;                // head_dim ** -0.5 when absent
  void* stream = nullptr;                     // CUDA stream handle; null is the legacy default stream
};

void qsa_sparse_paged_attention(const QsaSparsePagedAttentionArguments& arguments);

}  // namespace ragged_attention
