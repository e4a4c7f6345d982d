// What a kernel of qsa_sparse_attention is given: validated, and plain enough to pass by value to the device.
#pragma once

#include <cstdint>

#include "common/paged.h"
#include "common/ragged.h"
#include "ragged_attention/tensor_view.h"

namespace ragged_attention {

struct QsaParams {
  const void* q = nullptr;  // [total_q, num_q_heads, head_dim]; strides in elements here and below
  std::int64_t q_row_stride = 0;
  std::int64_t q_head_stride = 0;
  void* out = nullptr;
  std::int64_t out_row_stride = 0;
  std::int64_t out_head_stride = 0;
  float* lse = nullptr;  // null when not wanted
  std::int64_t lse_row_stride = 0;
  std::int64_t lse_head_stride = 0;

  RaggedRows rows;                                // the query rows of each sequence
  const std::int32_t* row_to_sequence = nullptr;  // if not null: the sequence of each row (-1: none), instead of `rows`
  IntegerArray cache_lengths;                     // [batch]; without data: all that the page table reaches
  PagedCache cache;                               // the layer's K and V
  const std::int32_t* token_indices = nullptr;    // [total_q, selection_width], contiguous rows
  std::int64_t token_indices_row_stride = 0;
  const std::int32_t* counts = nullptr;  // [total_q]
  std::int64_t counts_stride = 1;
  std::int64_t selection_width = 0;

  DType dtype;      // of q and the cache: float32, float16 or bfloat16
  DType out_dtype;  // float32, float16 or bfloat16
  std::int32_t num_q_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim = 0;       // a multiple of 8, 8 to 256
  float scale = 1.0f;              // finite; may be 0 or negative
  std::int64_t longest_hint = -1;  // max_prompt_length; -1: none given

  RAGGED_ATTENTION_HOST_DEVICE std::int32_t group() const { return num_q_heads / num_kv_heads; }

  // There is something to write. (Without query heads there may be no kv heads either, and group() has no meaning.)
  bool has_output() const { return rows.total > 0 && num_q_heads > 0; }

  // Entries of a row's list that count: counts[row] clamped to [0, selection_width].
  RAGGED_ATTENTION_HOST_DEVICE std::int64_t count(std::int64_t row) const {
    const std::int64_t value = counts[row * counts_stride];
    return value < 0 ? 0 : (value > selection_width ? selection_width : value);
  }

  // What one row reads: its sequence, and how many keys that sequence has; sequence -1 where no sequence owns the row.
  struct RowSource {
    std::int64_t sequence = -1;
    std::int64_t length = 0;
  };

  RAGGED_ATTENTION_HOST_DEVICE RowSource source(std::int64_t row) const {
    std::int64_t sequence = -1;
    if (row_to_sequence != nullptr) {
      sequence = row_to_sequence[row];
      if (sequence < 0 || sequence >= rows.batch) return {};
    } else {
      const std::int64_t segment = rows.segment_of_row(row);
      if (!rows.owned(segment)) return {};
      sequence = segment - 1;
    }
    if (cache_lengths.data == nullptr) return {sequence, cache.max_pages * cache.page_size};
    return {sequence, visible_length(cache_lengths[sequence], rows.rows(sequence + 1).size())};
  }
};

// Runs on the calling thread and the library's pool; returns when `out` is written.
void qsa_sparse_attention_cpu(const QsaParams& params);

}  // namespace ragged_attention
