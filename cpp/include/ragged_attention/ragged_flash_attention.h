// Flash attention over ragged q, k and v without a KV cache.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "ragged_attention/tensor_view.h"

namespace ragged_attention {

struct RaggedFlashAttentionArguments {
  TensorView q;                   // [total_seq_len, num_q_heads, head_dim]
  TensorView k;                   // [total_seq_len, num_kv_heads, head_dim]
  TensorView v;                   // [total_seq_len, num_kv_heads, head_dim]
  TensorView input_row_offsets;   // [batch + 1], uint32, int32 or int64
  TensorView out;                 // [total_seq_len, num_q_heads, head_dim]
  std::optional<TensorView> lse;  // [total_seq_len, num_q_heads], float32
  std::string mask_str = "causal";
  std::int64_t local_window_size = -1;        // -1: no window
  std::optional<double> scale;                // head_dim ** -0.5 when absent
  std::optional<std::int64_t> q_max_seq_len;  // a hint; no result depends on it
  void* stream = nullptr;                     // CUDA stream handle; null is the legacy default stream
  bool check_values = false;                  // read the device's values and raise on a bad one; synchronises
};

// Checks everything the host can see, then enqueues the work on `stream` (CUDA) or does it (CPU).
void ragged_flash_attention(const RaggedFlashAttentionArguments& arguments);

// The checks alone: of shapes, dtypes and parameters that a compiler knows before there is memory.
void check_ragged_flash_attention(const RaggedFlashAttentionArguments& arguments);

}  // namespace ragged_attention
