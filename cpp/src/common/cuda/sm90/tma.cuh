// Barriers in shared memory, and TMA copies of ragged tensors (ragged_coordinates.h says how their coordinates work).
#pragma once

#include <cuda.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "common/cuda/sm90/ragged_coordinates.h"

namespace ragged_attention::sm90 {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

// Where a ring of kStages buffers stands, in one register. Over 2^32 uses only where kStages is a power of two.
template <int kStages>
struct Ring {
  std::uint32_t position = 0;  // buffers used so far

  __device__ __forceinline__ std::uint32_t index() const { return position % kStages; }
  // That the barrier of buffer index() completes with when it is full. When it is empty again: the other.
  __device__ __forceinline__ std::uint32_t full_parity() const { return position / kStages % 2; }
  // The first use of a buffer does not have to wait: a new barrier passes for the parity before its first.
  __device__ __forceinline__ std::uint32_t empty_parity() const { return full_parity() ^ 1; }
  __device__ __forceinline__ void advance() { ++position; }
};

// A box of 64 columns of one head, from row `row` of the sequence that has `length` rows from `begin` on. Rows past its
// end and columns past head_dim arrive as zeros.
__device__ __forceinline__ void load_box(const CUtensorMap& map, std::uint64_t* barrier, void* shared, int column,
                                         int head, int begin, int length, int row) {
  const std::int32_t wrap = kRaggedWrap;  // taken by reference
  cute::SM90_TMA_LOAD_5D::copy(&map, barrier, static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                               shared, column, head, ragged_row(length, row), ragged_end(begin, length), wrap);
}

// The same box back to global memory; what lies past the sequence's end is not written.
__device__ __forceinline__ void store_box(const CUtensorMap& map, const void* shared, int column, int head, int begin,
                                          int length, int row) {
  const std::int32_t wrap = kRaggedWrap;
  cute::SM90_TMA_STORE_5D::copy(&map, shared, column, head, ragged_row(length, row), ragged_end(begin, length), wrap);
}

}  // namespace ragged_attention::sm90
