// Attention over selected tokens of a paged cache for bfloat16 and float16 on Hopper: sequences of many rows.
//
// A CTA has a group of neighbouring rows (groups.h) and one kv head. What several rows of the group list is gathered
// once, by cp.async, and meets all their query heads in one product.
//   Producer warpgroup: plans the union of the lists (plan.h), looks up pages, copies K and V tile by tile, with a mask
//     for each tile: which row lists which token.
//   Consumer warpgroup, for each tile: S = Q K^T, masked; online softmax; O += P V, P from registers.
// Groups are counted from a sequence's first row, and what they do follows from their own lists: so do the bits.
#pragma once

#include "common/cuda/launch.h"
#include "common/cuda_host.h"
#include "qsa_sparse_attention/sm90/consumer.cuh"
#include "qsa_sparse_attention/sm90/launch.h"
#include "qsa_sparse_attention/sm90/producer.cuh"

namespace ragged_attention::sm90 {

// By all lanes of a warp. No rows: no group has this number.
__device__ __forceinline__ QsaUnit find_unit(const QsaGroupsParams& params, std::uint32_t number) {
  const QsaParams& call = params.call.params;
  const RowGroups groups{call.rows, params.group_rows};
  const auto kv_heads = static_cast<std::uint32_t>(call.num_kv_heads);
  // From the last group to the first: a sequence's late rows have the longer lists. A row's kv heads side by side:
  // their keys are neighbours in memory.
  const auto id = static_cast<std::int64_t>(groups.num_ids() - 1 - number / kv_heads);
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
  unit.kv_head = static_cast<int>(number % kv_heads);
  if (unit.group.rows > 0) {
    unit.sequence = unit.group.segment - 1;
    const std::int64_t length =
        visible_length(call.cache_lengths[unit.sequence], call.rows.rows(unit.group.segment).size());
    unit.length = static_cast<std::int32_t>(length < params.longest ? length : params.longest);
  }
  return unit;
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
    Barrier::init(&shared.verdict, 4);
    shared.again = 0;
    cutlass::arch::fence_barrier_init();
  }
  cudaTriggerProgrammaticLaunchCompletion();
  if (threadIdx.x < 32) {
    const QsaUnit unit = find_unit(params, blockIdx.x);
    if (threadIdx.x == 0) shared.unit = unit;
  }
  __syncthreads();
  if (shared.unit.group.rows > 0) {
    const bool shares = shared.unit.shares();
    if (threadIdx.x >= 128) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
      QsaProducer<Traits> producer(params, shared);
      bool again = false;
#pragma unroll 1
      do {
        producer.pass(again);
        if (again || !shares) break;
        Barrier::wait(&shared.verdict, 0);
        again = shared.again != 0;
      } while (again);
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
      QsaConsumer<Traits> consumer(params, shared);
      consumer.start();
      if (shares) {
        QsaPlanner<Traits>{params, shared, shared.unit, static_cast<int>(threadIdx.x) + 128, 256}.mark(
            0, words_of(shared.unit));
      }
      consumer.wait_for_q();
      consumer.template pass<false>();
      if (shares) {
        const bool bad = __any_sync(0xffffffff, consumer.special());
        if (threadIdx.x % 32 == 0) {
          if (bad) shared.again = 1;
          Barrier::arrive(&shared.verdict);
        }
        Barrier::wait(&shared.verdict, 0);
        if (shared.again != 0) consumer.template pass<true>();
      }
      consumer.store();
    }
  }
  // The kernel before this one may still be at work; whatever comes next on the stream waits for this one alone.
  cudaGridDependencySynchronize();
}

template <typename Element, int kHeadDim>
void launch_qsa_groups(const portable::QsaKernelParams& call, bool beside, int device, StreamHandle stream) {
  using Traits = QsaTraits<Element, kHeadDim>;
  // 1 KB of each CTA's shared memory is the system's.
  static_assert(2 * (sizeof(QsaShared<Traits>) + 1024) <= 228 * 1024, "two CTAs share a multiprocessor");
  const QsaParams& params = call.params;
  QsaGroupsParams kernel_params;
  kernel_params.call = call;
  kernel_params.scale_log2 = params.scale * kLog2E;
  kernel_params.group_rows = qsa_group_rows(params.group());
  for (int shift = 0; shift < 31; ++shift) {
    if (params.cache.page_size == std::int64_t{1} << shift) kernel_params.page_shift = shift;
  }
  const std::int64_t most = 0x7fffffff;
  const bool all = params.cache.max_pages > 0 && params.cache.page_size > most / params.cache.max_pages;
  kernel_params.longest = static_cast<std::int32_t>(all ? most : params.cache.max_pages * params.cache.page_size);
  const RowGroups groups{params.rows, kernel_params.group_rows};
  launch<qsa_groups_kernel<Traits>>(kernel_params, groups.num_ids() * params.num_kv_heads, Traits::kThreads,
                                    sizeof(QsaShared<Traits>), device, static_cast<cudaStream_t>(stream),
                                    "launching qsa_sparse_attention", beside);
}

}  // namespace ragged_attention::sm90
