// Short sequences on Hopper (decode, multi-token prediction), row by row.
//
// A cluster of CTAs shares out the list of one row and kv head, tile t of 16 entries to warp t of all its warps in
// turn; what a warp does with its tiles is the portable kernel's (cuda/kernel.cuh): a ring in shared memory, m16n8k16
// with the query heads as rows. The warps' partial results stay in shared memory, and each CTA merges a part of the
// columns from all of them, in the order of ranks and warps: bits depend on the row's own list alone.
#pragma once

#include <cooperative_groups.h>

#include "common/cuda/launch.h"
#include "common/cuda/sm90/warp_search.h"
#include "common/cuda_host.h"
#include "qsa_sparse_attention/cuda/kernel.cuh"
#include "qsa_sparse_attention/sm90/config.h"
#include "qsa_sparse_attention/sm90/groups.h"
#include "qsa_sparse_attention/sm90/launch.h"

namespace ragged_attention::sm90 {

constexpr int kRowWarps = 4;

// Where a row of this kernel comes from; `mine` false for those of long sequences.
struct RowOrigin {
  QsaParams::RowSource source;
  bool mine = false;
};

__device__ __forceinline__ RowOrigin origin_of(const QsaParams& params, std::int64_t row, std::int64_t segment) {
  RowOrigin origin;
  const RowRange range = params.rows.rows(segment);
  const bool owned = params.rows.owned(segment) && row >= range.begin && row < range.end;
  origin.mine = !is_long(range.size(), owned);
  if (owned && origin.mine) {
    origin.source = {segment - 1, visible_length(params.cache_lengths[segment - 1], range.size())};
  }
  return origin;
}

// By all lanes of a warp.
__device__ __forceinline__ RowOrigin origin_of(const QsaParams& params, std::int64_t row) {
  WarpSearch search{0, static_cast<std::int32_t>(params.rows.num_segments())};
#pragma unroll 1
  while (!search.done()) {
    const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x % 32), probe = search.probe(lane);
    const bool holds = lane == 0 || (probe < search.high && params.rows.boundary(probe) <= row);
    search.narrow(__popc(__ballot_sync(0xffffffff, holds)));
  }
  return origin_of(params, row, search.low);
}

template <int kHeadDim>
__device__ __forceinline__ void merge_cluster(const portable::QsaKernelParams& call,
                                              const portable::WarpPartials& partials, std::int64_t row, int first_head,
                                              int heads) {
  namespace cg = cooperative_groups;
  const cg::cluster_group cluster = cg::this_cluster();
  const QsaParams& params = call.params;
  constexpr int kFours = kHeadDim / 4, kHeads = portable::kQsaTileHeads, kParts = kQsaSplits * kRowWarps;
  const int rank = static_cast<int>(blockIdx.x) % kQsaSplits, fours = heads * kFours;
  for (int i = fours * rank / kQsaSplits + static_cast<int>(threadIdx.x); i < fours * (rank + 1) / kQsaSplits;
       i += 32 * kRowWarps) {
    const int head = i / kFours, column = i % kFours * 4;
    float largest = -INFINITY, total = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float maximum =
          *cluster.map_shared_rank(partials.maxima + part % kRowWarps * kHeads + head, part / kRowWarps);
      largest = fmaxf(largest, maximum);
    }
    float4 result = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int part = 0; part < kParts; ++part) {
      const int slot = part % kRowWarps * kHeads + head;
      const float maximum = *cluster.map_shared_rank(partials.maxima + slot, part / kRowWarps);
      const float sum = *cluster.map_shared_rank(partials.sums + slot, part / kRowWarps);
      const float4 value = *reinterpret_cast<const float4*>(
          cluster.map_shared_rank(partials.outputs + slot * kHeadDim + column, part / kRowWarps));
      // Two that are equal may both be -inf or inf.
      const float weight = maximum == largest ? 1.0f : exp2_approximate(maximum - largest);
      total = __fmaf_rn(weight, sum, total);
      result.x = __fmaf_rn(weight, value.x, result.x);
      result.y = __fmaf_rn(weight, value.y, result.y);
      result.z = __fmaf_rn(weight, value.z, result.z);
      result.w = __fmaf_rn(weight, value.w, result.w);
    }
    const float inverse = inverse_of_sum(total);
    portable::store_four(call, row, first_head + head, column,
                         make_float4(result.x * inverse, result.y * inverse, result.z * inverse, result.w * inverse));
    if (params.lse != nullptr && column == 0) {
      params.lse[row * params.lse_row_stride + (first_head + head) * params.lse_head_stride] =
          natural_lse(largest, total);
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(32 * kRowWarps, 2)
    qsa_rows_kernel(const __grid_constant__ portable::QsaKernelParams call) {
  const QsaParams& params = call.params;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  cudaTriggerProgrammaticLaunchCompletion();
  const int group = params.group(), lane = static_cast<int>(threadIdx.x) % 32;
  const int head_tiles = (group + portable::kQsaTileHeads - 1) / portable::kQsaTileHeads;
  const int rank = static_cast<int>(blockIdx.x) % kQsaSplits, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t items = params.rows.total * params.num_kv_heads * head_tiles;
  const std::int64_t step = gridDim.x / kQsaSplits;
  if (step < items) {
    // There may be nothing for this kernel at all.
    bool mine = false;
    for (std::int64_t segment = threadIdx.x; segment < params.rows.num_segments() && !mine; segment += blockDim.x) {
      const std::int64_t length = params.rows.rows(segment).size();
      mine = length > 0 && !is_long(length, params.rows.owned(segment));
    }
    if (!__syncthreads_or(mine)) {
      cudaGridDependencySynchronize();
      return;
    }
  }
  const auto row_of = [&](std::int64_t item) { return item / head_tiles / params.num_kv_heads; };
#pragma unroll 1
  for (std::int64_t item = blockIdx.x / kQsaSplits; item < items; item += step) {
    if (item + step < items) {
      // Many to look through, most of them none of this kernel's: each lane searches for one.
      const std::int64_t one = item + step * lane;
      const bool has = one < items && origin_of(params, row_of(one), params.rows.segment_of_row(row_of(one))).mine;
      const std::uint32_t found = __ballot_sync(0xffffffff, has);
      item += step * (found == 0 ? 31 : __ffs(found) - 1);
      if (found == 0) continue;
    }
    const std::int64_t row = row_of(item);
    const RowOrigin origin = origin_of(params, row);
    if (!origin.mine) continue;
    const int head_tile = static_cast<int>(item % head_tiles);
    const int kv_head = static_cast<int>(item / head_tiles % params.num_kv_heads);
    const int first_head = kv_head * group + head_tile * portable::kQsaTileHeads;
    const int heads = min(portable::kQsaTileHeads, group - head_tile * portable::kQsaTileHeads);
    const portable::WarpPartials partials =
        portable::attend_row<Traits>(call, shared_bytes, row, origin.source, kv_head, first_head, heads,
                                     rank * kRowWarps + warp, kQsaSplits * kRowWarps);
    cute::cluster_arrive();  // partial results are there
    cute::cluster_wait();
    merge_cluster<Traits::kHeadDim>(call, partials, row, first_head, heads);
    cute::cluster_arrive_relaxed();  // and have been read
    cute::cluster_wait();
  }
  // The kernel before this one may still be at work; whatever comes next on the stream waits for this one alone.
  cudaGridDependencySynchronize();
}

template <typename Element, int kHeadDim>
void launch_qsa_rows(const portable::QsaKernelParams& given, bool beside, bool sparse, int device,
                     StreamHandle stream) {
  portable::QsaKernelParams call = given;
  const QsaParams& params = call.params;
  const std::int64_t head_tiles = (params.group() + portable::kQsaTileHeads - 1) / portable::kQsaTileHeads;
  const std::int64_t items = params.rows.total * params.num_kv_heads * head_tiles;
  const int multiprocessors = cuda_device_info(device).num_multiprocessors;
  // Deeper rings where a CTA has a multiprocessor to itself; three CTAs on one hide each other's latency better.
  constexpr int kDeep = 32, kUsual = kHeadDim == 256 ? 16 : 32;
  const int unroll = items * kQsaSplits <= multiprocessors ? kDeep : kUsual;
  call.tiles_in_flight = unroll / portable::kQsaTileKeys;
  const std::int64_t clusters =
      sparse ? std::min<std::int64_t>(items, std::max(1, 3 * multiprocessors / kQsaSplits)) : items;
  launch<qsa_rows_kernel<portable::QsaTraits<Element, kHeadDim>>>(
      call, clusters * kQsaSplits, 32 * kRowWarps, portable::qsa_shared_bytes(kHeadDim, kRowWarps, unroll), device,
      static_cast<cudaStream_t>(stream), "launching qsa_sparse_attention", beside, kQsaSplits);
}

}  // namespace ragged_attention::sm90
