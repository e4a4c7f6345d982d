// One row and kv head of qsa_sparse_attention on the CPU: what the driver gives a kernel, and the kernels there are.
//
// Plain data only: this header is compiled with every set of instruction-set flags.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/cpu/element.h"

namespace ragged_attention {

constexpr int kQsaBlockKeys = 64;  // tokens whose weights are held at a time

struct QsaRow {
  const void* q;  // the row, the kv head's first query head; strides in elements here and below
  int64_t q_head_stride;
  const void* k;  // the cache at the kv head
  const void* v;
  const int64_t* offsets;  // [num_tokens]: where each attended token lies, counted from k and from v
  int64_t num_tokens;
  void* out;  // the row, the kv head's first query head
  int64_t out_head_stride;
  float* lse;  // null when not wanted
  int64_t lse_head_stride;

  int32_t num_heads;  // query heads that share the kv head
  int32_t head_dim;
  CpuElement element;
  CpuElement out_element;
  float scale_log2;  // scale * log2(e)

  float* workspace;  // 64-byte aligned: num_heads * (2 * dim + kQsaBlockKeys + 4) + kQsaBlockKeys * dim floats, where
                     // dim is head_dim rounded up to a multiple of 16
};

using QsaRowKernel = void (*)(const QsaRow& row);

void qsa_row_baseline(const QsaRow& row);
#if defined(RAGGED_ATTENTION_CPU_X86)
void qsa_row_avx2(const QsaRow& row);
void qsa_row_avx512(const QsaRow& row);
#endif

}  // namespace ragged_attention
