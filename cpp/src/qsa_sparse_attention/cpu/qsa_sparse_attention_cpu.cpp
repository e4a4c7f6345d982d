// Driver of qsa_sparse_attention on the CPU: resolves each row's list to addresses and hands rows to the pool.
//
// A task is one row with some or all of its kv heads. Nothing is split inside a row and kv head, so a row's result
// depends neither on the rest of the batch nor on the threads.

#include <algorithm>
#include <cstdint>

#include "common/cpu/driver.h"
#include "common/cpu_features.h"
#include "common/thread_pool.h"
#include "qsa_sparse_attention/cpu/kernel.h"
#include "qsa_sparse_attention/params.h"

namespace ragged_attention {
namespace {

QsaRowKernel kernel_for(CpuIsa isa) {
#if defined(RAGGED_ATTENTION_CPU_X86)
  if (isa == CpuIsa::kAvx512) return qsa_row_avx512;
  if (isa == CpuIsa::kAvx2) return qsa_row_avx2;
#endif
  (void)isa;
  return qsa_row_baseline;
}

// Writes where the attended tokens of `row` lie and returns how many there are. Tokens that count as not listed are
// left out here, so a row's blocks hold what it attends to and nothing else.
std::int64_t resolve_tokens(const QsaParams& params, std::int64_t row, std::int64_t* offsets) {
  const QsaParams::RowSource source = params.source(row);
  if (source.sequence < 0) return 0;
  const std::int64_t count = params.count(row);
  const std::int32_t* const tokens = params.token_indices + row * params.token_indices_row_stride;
  std::int64_t num_tokens = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t offset = token_offset(params.cache, source.sequence, tokens[i], source.length);
    if (offset != kNotListed) offsets[num_tokens++] = offset;
  }
  return num_tokens;
}

}  // namespace

void qsa_sparse_attention_cpu(const QsaParams& params) {
  if (params.rows.total <= 0 || params.num_q_heads <= 0) return;
  const QsaRowKernel kernel = kernel_for(cpu_isa());
  const CpuElement element = cpu_element(params.dtype);
  const CpuElement out_element = cpu_element(params.out_dtype);
  const float scale_log2 = static_cast<float>(static_cast<double>(params.scale) * 1.44269504088896340736);
  const std::int64_t group = params.group();
  const std::int64_t padded_dim = (params.head_dim + 15) / 16 * 16;
  const std::size_t workspace_bytes =
      sizeof(float) *
      static_cast<std::size_t>(group * (2 * padded_dim + kQsaBlockKeys + 4) + kQsaBlockKeys * padded_dim);
  const std::size_t offsets_bytes = sizeof(std::int64_t) * static_cast<std::size_t>(params.selection_width);

  // A task with all kv heads resolves the list once for all of them; with few rows the threads matter more.
  const bool split_heads = params.rows.total < 4 * static_cast<std::int64_t>(num_threads());
  const std::int64_t heads_per_task = split_heads ? 1 : params.num_kv_heads;
  const std::int64_t tasks_per_row = params.num_kv_heads / heads_per_task;

  parallel_for(params.rows.total * tasks_per_row, [&](std::int64_t task) {
    const std::int64_t row = task / tasks_per_row;
    const std::int64_t first_head = task % tasks_per_row * heads_per_task;
    thread_local Workspace workspace, offsets_workspace;
    std::int64_t* const offsets = static_cast<std::int64_t*>(offsets_workspace.reserve(offsets_bytes));
    const std::int64_t num_tokens = resolve_tokens(params, row, offsets);
    for (std::int64_t kv_head = first_head; kv_head < first_head + heads_per_task; ++kv_head) {
      const std::int64_t head = kv_head * group;
      QsaRow work{};
      work.q = element_address(params.q, row * params.q_row_stride + head * params.q_head_stride, element);
      work.q_head_stride = params.q_head_stride;
      work.k = element_address(params.cache.k, kv_head * params.cache.head_stride, element);
      work.v = element_address(params.cache.v, kv_head * params.cache.head_stride, element);
      work.offsets = offsets;
      work.num_tokens = num_tokens;
      work.out = element_address(params.out, row * params.out_row_stride + head * params.out_head_stride, out_element);
      work.out_head_stride = params.out_head_stride;
      if (params.lse != nullptr) work.lse = params.lse + row * params.lse_row_stride + head * params.lse_head_stride;
      work.lse_head_stride = params.lse_head_stride;
      work.num_heads = static_cast<std::int32_t>(group);
      work.head_dim = params.head_dim;
      work.element = element;
      work.out_element = out_element;
      work.scale_log2 = scale_log2;
      work.workspace = static_cast<float*>(workspace.reserve(workspace_bytes));
      kernel(work);
    }
  });
}

}  // namespace ragged_attention
