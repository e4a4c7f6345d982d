// What the kernel is given, and what its two roles share.
#pragma once

#include "common/cuda/sm90/tma.cuh"
#include "common/cuda/sm90/warp_search.h"
#include "common/cuda/sm90/wgmma.cuh"
#include "qsa_sparse_attention/cuda/launch.h"
#include "qsa_sparse_attention/sm90/groups.h"
#include "qsa_sparse_attention/sm90/pages.cuh"
#include "qsa_sparse_attention/sm90/plan.h"

namespace ragged_attention::sm90 {

struct QsaGroupsParams {
  portable::QsaKernelParams call;
  float scale_log2 = 0.0f;  // scale * log2(e)
  std::int32_t group_rows = 1;
  std::int32_t page_shift = -1;  // log2 of the page size where that is a whole number
  std::int32_t longest = 0;      // tokens that a page table has room for
  std::int64_t num_units = 0;    // groups (some of them none) times kv heads
  QsaApart apart;                // of groups.h

  template <bool kShort>
  RAGGED_ATTENTION_HOST_DEVICE RowGroups<kShort> groups() const {
    return {call.params.rows, group_rows, apart};
  }
};

template <typename Element_, int kHeadDim_, bool kShort_>
struct QsaTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kShort = kShort_;
  static constexpr int kSplits = kShort ? kQsaSplits : 1;  // CTAs of a cluster
  static constexpr int kKeys = QsaTile<kHeadDim>::kKeys;
  static constexpr int kBlocks = kHeadDim / kBlockColumns;
  static constexpr int kMaskWords = kKeys / 32;
  static constexpr int kProducerWarps = 4, kThreads = 256;
  // As much as the launch allocates: 128 for every thread.
  static constexpr int kProducerRegisters = 48, kConsumerRegisters = 208;
  static_assert(kProducerRegisters + kConsumerRegisters == 256);
};

// One group and one kv head: what a CTA, or a cluster of them, does at a time.
struct QsaUnit {
  RowGroup group;
  std::int32_t kv_head = 0;
  std::int32_t length = 0;  // tokens that its rows may name
  std::int64_t sequence = 0;

  __device__ __forceinline__ bool needs_plan() const { return group.owned && group.rows > 1; }
};

// What the producers gather: the written-out part of a window's plan, or what a row lists of the window.
struct QsaSource {
  static constexpr std::int32_t kPlanned = -1;
  std::int32_t row;         // of the group; or kPlanned
  std::int32_t base;        // of the window
  std::int32_t words;       // of the window
  std::int32_t begin, end;  // entries
};

// Of a CTA.
enum QsaRole : int { kConsumes = 0, kProduces = 1 };

template <typename Traits>
struct QsaShared {
  using Element = typename Traits::Element;
  // Blocks of 64 columns, each row 128 bytes with its 16-byte chunks swizzled.
  alignas(1024) Element q[Traits::kBlocks][64][kBlockColumns];
  alignas(1024) Element k[Traits::kBlocks][Traits::kKeys][kBlockColumns];
  alignas(1024) Element v[Traits::kBlocks][Traits::kKeys][kBlockColumns];
  alignas(16) std::uint32_t plan[kQsaPlanBytes / 4];  // [rows][words]
  std::uint16_t list[kQsaListEntries];
  QsaUnit unit[2];            // that a role is at; registers are short
  std::int64_t next_unit[2];  // to look at
  QsaSource source;
  // With K: which of the tile's tokens each row of the group lists; or that the pass has ended.
  std::uint32_t listed[kQsaMaxGroupRows][Traits::kMaskWords];
  std::int32_t end;
  // full: by each producer thread's copies, and by each producer warp (K). empty: by each consumer warp.
  std::uint64_t k_full, k_empty, v_full, v_empty;
  std::uint64_t planned;     // by each warp, where both roles mark a window
  std::uint64_t verdict;     // by each consumer warp, after the first pass over a group of several rows
  std::int32_t bad_verdict;  // the last one that asked for a second pass
  std::int32_t warp_total[Traits::kProducerWarps];  // the plan's: tokens in each producer warp's words
  std::uint16_t before[128];                        // and before those of each producer thread
  std::int32_t beyond, duplicate;  // the plan's: the first local token after the window; a token that a row lists twice
  // The second pass's: tokens of the tile whose values are not all finite, and one of them: its values, and what each
  // row of the product gives it.
  std::uint32_t special[Traits::kMaskWords];
  Element special_weight[64];
  alignas(16) Element special_value[Traits::kHeadDim];

  // Once all tiles are consumed: what this CTA has of each row, in the place of Q, K and V.
  static constexpr int kPartialStride = Traits::kHeadDim + 8;  // columns; the 8 spread a quad's rows over the banks
  __device__ float* partial_output() { return reinterpret_cast<float*>(&q[0][0][0]); }
  __device__ float* partial_maximum() { return partial_output() + 64 * kPartialStride; }
  __device__ float* partial_sum() { return partial_maximum() + 64; }
  static_assert((64 * kPartialStride + 128) * 4 <= 2 * (64 + 2 * Traits::kKeys) * Traits::kHeadDim);
};

// Of bar.sync; 0 is all threads'.
enum QsaBarrier : std::uint32_t { kProducers = 1, kQsaConsumers = 2 };

// A warp arrives, behind all that its lanes did before, and waits for as many warps as the barrier counts.
__device__ __forceinline__ void warps_meet(std::uint64_t* barrier, std::uint32_t parity, int thread) {
  __syncwarp();
  if (thread % 32 == 0) Barrier::arrive(barrier);
  Barrier::wait(barrier, parity);
}

__device__ __forceinline__ void producers_sync() { cutlass::arch::NamedBarrier::sync(128, kProducers); }
__device__ __forceinline__ void consumers_sync() { cutlass::arch::NamedBarrier::sync(128, kQsaConsumers); }

// 16 bytes to shared memory: what lies at `from`, or zeros in the place of what does not exist.
__device__ __forceinline__ void copy_16(std::uint32_t to, const void* from, bool exists = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

// By all threads of a cluster, of kCtas CTAs. `releases`: what this thread wrote to shared memory is to be seen by the
// others.
template <int kCtas>
__device__ __forceinline__ void cluster_sync(bool releases) {
  if constexpr (kCtas > 1) {
    if (releases) {
      cute::cluster_arrive();
    } else {
      cute::cluster_arrive_relaxed();
    }
    cute::cluster_wait();
  }
}

constexpr std::int64_t kNowhere = INT64_MIN;  // in the place of an offset

// The tokens of the lanes from `from_lane` on, each at its lane's `offset`, to the rows of a tile from `row` on, a
// multiple of 8; zeros where there is no token. Eight lanes copy 128 bytes of a token side by side, then the next 128:
// one shuffle and address for all of it.
template <int kTileRows, int kTokens, int kBlocks>
__device__ __forceinline__ void copy_tokens(const void* data, std::int64_t offset, int from_lane, std::uint32_t tile,
                                            int row, int lane) {
  constexpr int kSide = kBlockRowBytes / 16, kAtOnce = 32 / kSide;
  const char* const from = static_cast<const char*>(data) + lane % kSide * 16;
  const std::uint32_t to = tile + chunk_offset<kTileRows>(row + lane / kSide, lane % kSide);
#pragma unroll
  for (int i = 0; i < kTokens; i += kAtOnce) {
    const std::int64_t of_token = __shfl_sync(0xffffffff, offset, from_lane + i + lane / kSide);
    const bool exists = of_token != kNowhere;
    const char* const token = exists ? from + of_token : from;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      copy_16(rows_down(to, i) + block * kTileRows * kBlockRowBytes, token + block * kBlockRowBytes, exists);
    }
  }
}

// The barrier counts this thread's arrival once all its copies so far are there.
__device__ __forceinline__ void arrive_after_copies(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

}  // namespace ragged_attention::sm90
