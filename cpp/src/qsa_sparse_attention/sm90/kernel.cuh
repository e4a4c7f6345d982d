// Attention over selected tokens of a paged cache for bfloat16 and float16 on Hopper.
//
// A unit of work is a group of neighbouring rows (groups.h) and one kv head. What several rows of the group list is
// gathered once, by cp.async, and meets all their query heads in one product.
//   Producer warpgroup: plans the union of the lists (plan.h), looks up pages, copies K and V tile by tile, with a mask
//     for each tile: which row lists which token.
//   Consumer warpgroup, for each tile: S = Q K^T, masked; online softmax; O += P V, P from registers.
// Long sequences: one CTA a unit. Shorter ones: a cluster of CTAs a unit, each with its share of the context or list;
// they leave O, maximum and sum in shared memory, and each merges a part of the rows, two CTAs' by two. Both are fixed
// by the sequence's own rows, so are its bits.
#pragma once

#include <cooperative_groups.h>

#include "common/cuda/launch.h"
#include "common/cuda_host.h"
#include "qsa_sparse_attention/sm90/consumer.cuh"
#include "qsa_sparse_attention/sm90/launch.h"
#include "qsa_sparse_attention/sm90/merge.cuh"
#include "qsa_sparse_attention/sm90/producer.cuh"

namespace ragged_attention::sm90 {

// A unit's counts, lists and pages on their way to L2, before one read waits for the other; each CTA of the cluster
// sees to a part. By all lanes of a warp.
template <typename Traits>
__device__ __forceinline__ void fetch_ahead(const QsaParams& call, const RowGroup& group) {
  const int rank = static_cast<int>(blockIdx.x) % Traits::kSplits, lane = static_cast<int>(threadIdx.x) % 32;
  constexpr std::int64_t kLine = 128;
  const auto fetch = [](const void* data) { asm volatile("prefetch.global.L2 [%0];" ::"l"(data)); };
  const auto fetch_part = [&](const char* data, std::int64_t bytes) {
    const std::int64_t end = bytes * (rank + 1) / Traits::kSplits;
    for (std::int64_t at = bytes * rank / Traits::kSplits + lane * kLine; at < end; at += 32 * kLine) fetch(data + at);
  };
  if (lane < group.rows) fetch(call.counts + (group.begin + lane) * call.counts_stride);
  const IntegerMatrix& table = call.cache.lookup_table;
  if (table.row0.stride == 1) {
    const std::int64_t bytes = table.row0.type == IntegerType::kI64 ? 8 : 4;
    fetch_part(static_cast<const char*>(table.row0.data) + (group.segment - 1) * table.row_stride * bytes,
               call.cache.max_pages * bytes);
  }
#pragma unroll 1
  for (int row = 0; row < group.rows; ++row) {
    fetch_part(reinterpret_cast<const char*>(call.token_indices + (group.begin + row) * call.token_indices_row_stride),
               4 * call.selection_width);
  }
}

// By all lanes of a warp.
template <typename Traits>
__device__ __forceinline__ QsaUnit find_unit(const QsaGroupsParams& params, std::int64_t number) {
  const QsaParams& call = params.call.params;
  const auto groups = params.template groups<Traits::kShort>();
  const auto n = static_cast<std::uint32_t>(number), kv_heads = static_cast<std::uint32_t>(call.num_kv_heads);
  // From the last group to the first: a sequence's late rows have the longer lists. A row's kv heads side by side:
  // their keys are neighbours in memory.
  const auto id = static_cast<std::int64_t>(groups.num_ids() - 1 - n / kv_heads);
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  WarpSearch search{0, static_cast<std::int32_t>(call.rows.num_segments())};
#pragma unroll 1
  while (!search.done()) {
    const std::int32_t probe = search.probe(lane);
    const bool holds = lane == 0 || (probe < search.high && groups.first_id(probe) <= id);
    search.narrow(__popc(__ballot_sync(0xffffffff, holds)));
  }
  QsaUnit unit;
  unit.group = groups.group(id, search.low);
  unit.kv_head = static_cast<int>(n % kv_heads);
  if (unit.group.rows > 0 && unit.group.owned) {
    unit.sequence = unit.group.segment - 1;
    if constexpr (Traits::kShort) fetch_ahead<Traits>(call, unit.group);
    const std::int64_t length =
        visible_length(call.cache_lengths[unit.sequence], call.rows.rows(unit.group.segment).size());
    unit.length = static_cast<std::int32_t>(length < params.longest ? length : params.longest);
    if (groups.apart.by_length(length)) unit.group.rows = 0;
  }
  return unit;
}

// The next of this CTA's units that has rows. By all lanes of a warp.
template <typename Traits>
__device__ __forceinline__ QsaUnit scan_units(const QsaGroupsParams& params, std::int64_t* to_look_at) {
  const auto groups = params.template groups<Traits::kShort>();
  const std::int64_t kv_heads = params.call.params.num_kv_heads, step = gridDim.x / Traits::kSplits;
  std::int64_t next = *to_look_at;
  QsaUnit unit;
#pragma unroll 1
  while (next < params.num_units && unit.group.rows == 0) {
    if (next + step < params.num_units) {
      // Many to look through, most of them none of this kernel's: each lane searches for one.
      const std::int64_t mine = next + step * (threadIdx.x % 32);
      const bool has = mine < params.num_units && groups.group(groups.num_ids() - 1 - mine / kv_heads).rows > 0;
      const std::uint32_t found = __ballot_sync(0xffffffff, has);
      next += step * (found == 0 ? 32 : __ffs(found) - 1);
      if (found == 0) continue;
    }
    unit = find_unit<Traits>(params, next);
    next += step;
  }
  __syncwarp();  // all have read it
  if (threadIdx.x % 32 == 0) *to_look_at = next;
  return unit;
}

// By all warps of a role.
template <typename Traits>
__device__ __forceinline__ bool next_unit(const QsaGroupsParams& params, QsaShared<Traits>& shared, QsaRole role) {
  role == kProduces ? producers_sync() : consumers_sync();  // the last unit has been read
  if (threadIdx.x / 32 % 4 == 0) {
    const QsaUnit unit = scan_units<Traits>(params, &shared.next_unit[role]);
    if (threadIdx.x % 32 == 0) shared.unit[role] = unit;
  }
  role == kProduces ? producers_sync() : consumers_sync();
  return shared.unit[role].group.rows > 0;
}

// Rows of the cluster's unit, merged and stored; each CTA a part of them.
template <typename Traits>
__device__ __forceinline__ void merge(const QsaGroupsParams& params, QsaShared<Traits>& shared, const QsaUnit& unit,
                                      int rank) {
  namespace cg = cooperative_groups;
  const cg::cluster_group cluster = cg::this_cluster();
  const QsaParams& call = params.call.params;
  constexpr int kFours = Traits::kHeadDim / 4;
  const int heads = call.group(), fours = unit.group.rows * heads * kFours;
  const int begin = fours * rank / Traits::kSplits, end = fours * (rank + 1) / Traits::kSplits;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += 128) {
    const int row = i / kFours, column = i % kFours * 4;
    RowPart parts[Traits::kSplits];
#pragma unroll
    for (int split = 0; split < Traits::kSplits; ++split) {
      parts[split].maximum = *cluster.map_shared_rank(shared.partial_maximum() + row, split);
      parts[split].sum = *cluster.map_shared_rank(shared.partial_sum() + row, split);
      parts[split].output = *reinterpret_cast<const float4*>(
          cluster.map_shared_rank(shared.partial_output() + row * QsaShared<Traits>::kPartialStride + column, split));
    }
    merged(parts).store(params.call, unit.group.begin + row / heads, unit.kv_head * heads + row % heads, column);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 2)
    qsa_groups_kernel(const __grid_constant__ QsaGroupsParams params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<QsaShared<Traits>*>(shared_bytes);
  if (threadIdx.x == 0) {
    Barrier::init(&shared.k_full, 128 + Traits::kProducerWarps);
    Barrier::init(&shared.k_empty, 4);
    Barrier::init(&shared.v_full, 128);
    Barrier::init(&shared.v_empty, 4);
    Barrier::init(&shared.planned, Traits::kThreads / 32);
    Barrier::init(&shared.verdict, 4);
    shared.bad_verdict = -1;
    shared.next_unit[kConsumes] = shared.next_unit[kProduces] = blockIdx.x / Traits::kSplits;
    cutlass::arch::fence_barrier_init();
  }
  cudaTriggerProgrammaticLaunchCompletion();
  // Where there is more to look through than CTAs, there may be nothing for this kernel at all.
  bool mine = true;
  if (gridDim.x / Traits::kSplits < params.num_units) {
    mine = false;
    const RaggedRows& rows = params.call.params.rows;
    const auto groups = params.template groups<Traits::kShort>();
    for (std::int64_t segment = threadIdx.x; segment < rows.num_segments() && !mine; segment += Traits::kThreads) {
      const std::int64_t size = rows.rows(segment).size();
      const bool owned = rows.owned(segment);
      mine = groups.takes(size, owned) &&
             !(owned && groups.apart.by_length(visible_length(params.call.params.cache_lengths[segment - 1], size)));
    }
  }
  if (!__syncthreads_or(mine)) {
    cudaGridDependencySynchronize();
    return;
  }

  const int rank = static_cast<int>(blockIdx.x) % Traits::kSplits;
  Ring<1> verdicts;
  if (threadIdx.x >= 128) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    QsaProducer<Traits> producer(params, shared, rank);
#pragma unroll 1
    while (next_unit(params, shared, kProduces)) {
      bool again = false;
#pragma unroll 1
      do {
        producer.pass(again);
        if (again || producer.unit.group.rows == 1) break;
        Barrier::wait(&shared.verdict, verdicts.full_parity());
        again = shared.bad_verdict == static_cast<std::int32_t>(verdicts.position);
        verdicts.advance();
      } while (again);
      cluster_sync<Traits::kSplits>(false);  // partial results are there
      cluster_sync<Traits::kSplits>(false);  // and have been read
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    QsaConsumer<Traits> consumer(params, shared);
#pragma unroll 1
    while (next_unit(params, shared, kConsumes)) {
      consumer.start();
      if (consumer.unit.needs_plan()) {
        QsaPlanner<Traits>{params, shared, consumer.unit, {rank}, static_cast<int>(threadIdx.x) + 128, Traits::kThreads}
            .mark(0, words_of<Traits>(consumer.unit));
      }
      consumer.wait_for_q();
      consumer.template pass<false>();
      if (consumer.unit.group.rows > 1) {
        const bool bad = __any_sync(0xffffffff, consumer.special());
        if (threadIdx.x % 32 == 0) {
          if (bad) shared.bad_verdict = static_cast<std::int32_t>(verdicts.position);
          Barrier::arrive(&shared.verdict);
        }
        Barrier::wait(&shared.verdict, verdicts.full_parity());
        if (shared.bad_verdict == static_cast<std::int32_t>(verdicts.position)) consumer.template pass<true>();
        verdicts.advance();
      }
      if constexpr (Traits::kSplits > 1) {
        consumer.store_partial();
        cluster_sync<Traits::kSplits>(true);
        merge<Traits>(params, shared, consumer.unit, rank);
        cluster_sync<Traits::kSplits>(false);
      } else {
        consumer.store();
      }
    }
  }
  // The kernel before this one may still be at work; whatever comes next on the stream waits for this one alone.
  cudaGridDependencySynchronize();
}

// `ctas`: no more than that many look for groups.
template <typename Traits>
void launch_qsa_groups(const QsaGroupsParams& params, bool beside, std::int64_t ctas, int device, StreamHandle stream) {
  // 1 KB of each CTA's shared memory is the system's.
  static_assert(2 * (sizeof(QsaShared<Traits>) + 1024) <= 228 * 1024, "two CTAs share a multiprocessor");
  const std::int64_t clusters = std::min(params.num_units, std::max<std::int64_t>(1, ctas / Traits::kSplits));
  launch<qsa_groups_kernel<Traits>>(params, clusters * Traits::kSplits, Traits::kThreads, sizeof(QsaShared<Traits>),
                                    device, static_cast<cudaStream_t>(stream), "launching qsa_sparse_attention", beside,
                                    Traits::kSplits);
}

template <bool kShort>
QsaGroupsParams groups_params(const portable::QsaKernelParams& call) {
  const QsaParams& params = call.params;
  QsaGroupsParams result;
  result.call = call;
  result.scale_log2 = params.scale * kLog2E;
  result.group_rows = qsa_group_rows(params.group());
  result.page_shift = page_shift(params.cache);
  result.longest = longest_context(params.cache);
  result.apart = qsa_apart(params.group());
  result.num_units = result.template groups<kShort>().num_ids() * params.num_kv_heads;
  return result;
}

template <typename Element, int kHeadDim>
void launch_qsa_long(const portable::QsaKernelParams& call, bool beside, int device, StreamHandle stream) {
  launch_qsa_groups<QsaTraits<Element, kHeadDim, false>>(groups_params<false>(call), beside, kMaxGrid, device, stream);
}

template <typename Element, int kHeadDim>
void launch_qsa_short(const portable::QsaKernelParams& call, bool beside, bool sparse, int device,
                      StreamHandle stream) {
  const std::int64_t resident = 2 * cuda_device_info(device).num_multiprocessors;
  launch_qsa_groups<QsaTraits<Element, kHeadDim, true>>(groups_params<true>(call), beside, sparse ? resident : kMaxGrid,
                                                        device, stream);
}

}  // namespace ragged_attention::sm90
