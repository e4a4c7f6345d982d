// Ragged flash attention for bfloat16 and float16 on Hopper.
//
// Schedule of one CTA, resident until the work is done: two producer warps, and TileShape::consumers warpgroups that
// own 64 query rows each of a tile.
//   Scheduler: draws work, finds its tile from the offsets on the device, hands it on and loads Q, ahead by as many
//     tiles as Q has stages.
//   Loader: K and V, tile by tile, through two rings of TMA stages.
//   Consumers, for key tile t + 1: issue S = Q K[t + 1]^T, then O += P V[t], one behind the other; softmax of S; then P
//     takes S's place. The exponentials of a warpgroup so run under the products of another one: of the same CTA, which
//     with `turns` waits for its turn to issue, or of another CTA. At D 192 and 256 in the long kernel, without turns,
//     they also run under the warpgroup's own O += P V.
//   Epilogue: O / sum into Q's place in shared memory, from there by TMA, clipped at the sequence's end; LSE beside it.
// Rows past the sequence's end arrive as zeros (ragged_coordinates.h), so nothing of another sequence is ever
// multiplied. Key tiles start at the first key that the tile's first row sees: bits depend on the sequence alone.
#pragma once

#include <type_traits>

#include "common/cuda/launch.h"
#include "common/cuda/sm90/tma.cuh"
#include "common/cuda/sm90/warp_search.h"
#include "common/cuda/sm90/wgmma.cuh"
#include "common/cuda_host.h"
#include "ragged_flash_attention/sm90/launch.h"
#include "ragged_flash_attention/sm90/params.cuh"
#include "ragged_flash_attention/sm90/schedule.h"
#include "ragged_flash_attention/sm90/softmax.cuh"
#include "ragged_flash_attention/sm90/tiny.cuh"

namespace ragged_attention::sm90 {

template <typename Element_, int kHeadDim_, bool kLong_>
struct RaggedTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kLong = kLong_;
  static constexpr TileShape kShape = kLong ? Tiles<kHeadDim>::kLong : Tiles<kHeadDim>::kShort;
  static constexpr int kConsumers = kShape.consumers, kBlockM = 64 * kConsumers, kBlockN = kShape.block_n;
  static constexpr int kQStages = kShape.q_stages, kKStages = kShape.k_stages, kVStages = kShape.v_stages;
  static constexpr int kBlocks = (kHeadDim + kBlockColumns - 1) / kBlockColumns;  // of 64 columns
  using Schedule = sm90::Schedule<kBlockM, kLong ? Tiles<kHeadDim>::kShortRows : 0>;

  // setmaxnreg moves registers between whole warpgroups, so with it the producers are one too (two of its warps sleep).
  static constexpr bool kMovesRegisters = kConsumers > 1 || kShape.ctas > 2;
  static constexpr int kProducerThreads = kMovesRegisters ? 128 : 64;
  static constexpr int kThreads = 128 * kConsumers + kProducerThreads;
  // Together no more than the launch allocates: setmaxnreg waits for ever for the rest.
  static constexpr Registers kRegisters = registers(kShape);
  static_assert(!kMovesRegisters || kConsumers * kRegisters.consumer + kRegisters.producer <=
                                        (kConsumers + 1) * (65536 / (kThreads * kShape.ctas) / 8 * 8));

  // Keys and values stay where they are for all heads of a unit that share them, where they fit.
  static constexpr bool kKeepsKv = !kLong;

  // A softmax of few instructions that runs under the product of O, and O brought to a new maximum under the next
  // scores' product, only where there is one: 9 % at D 256 and 16384 rows. Up to D 128, with turns, slower.
  static constexpr bool kVoted = kLong && kHeadDim > 128;

  static_assert(kBlockN % 16 == 0 && kHeadDim % 16 == 0);
};

// A tile of queries as the scheduler hands it on.
template <int kConsumers>
struct TileWork {
  Tile tile;
  KeyTiles keys;
  KeySpan span[kConsumers];  // of each warpgroup
};

template <typename Traits>
struct Shared {
  using Element = typename Traits::Element;
  // Blocks of 64 columns, each row 128 bytes: what one TMA box writes. O takes Q's place.
  alignas(1024) Element q[Traits::kQStages][Traits::kBlocks][Traits::kBlockM][kBlockColumns];
  alignas(1024) Element k[Traits::kKStages][Traits::kBlocks][Traits::kBlockN][kBlockColumns];
  alignas(1024) Element v[Traits::kVStages][Traits::kBlocks][Traits::kBlockN][kBlockColumns];
  // full: by the scheduler or the loader, and their copies. empty: by each consumer warp (K, V); by each consumer
  // warpgroup and the loader (Q and work).
  std::uint64_t work_full[Traits::kQStages], q_full[Traits::kQStages], q_empty[Traits::kQStages];
  std::uint64_t k_full[Traits::kKStages], k_empty[Traits::kKStages];
  std::uint64_t v_full[Traits::kVStages], v_empty[Traits::kVStages];
  TileWork<Traits::kConsumers> work[Traits::kQStages];  // goes with Q
  TileWork<Traits::kConsumers> next;                    // the scheduler's own: registers are short there
  int tiny;                                             // of Work, what there is beside tiles; here likewise
};

// A multiprocessor has 228 KB, of which the system takes 1 KB a CTA.
template <typename Traits>
constexpr bool kFits = Traits::kShape.ctas * (sizeof(Shared<Traits>) + 1024) <= 228 * 1024;

// After the consumers.
enum ProducerWarp : int { kSchedulerWarp = 0, kLoaderWarp = 1 };

// Of bar.sync; one of each kind a warpgroup.
enum NamedBarrier : std::uint32_t { kEpilogue = 0, kTurn = 3 };

// One warp: finds tiles, hands them on to the loader and to the consumers, and loads their Q, as far ahead as there are
// stages for it.
template <typename Traits>
struct Scheduler {
  const RaggedKernelParams& params;
  Shared<Traits>& shared;
  Ring<Traits::kQStages> ring;

  __device__ __forceinline__ void run(const typename Traits::Schedule& schedule) {
    const auto units = static_cast<std::int32_t>(schedule.num_units());
    const auto ctas = static_cast<std::int32_t>(gridDim.x), cta = static_cast<std::int32_t>(blockIdx.x);
    const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
    std::int32_t number = cta;
#pragma unroll 1
    for (std::int32_t round = 1; number < units; ++round) {
      // Drawn early: the answer takes a microsecond.
      std::int32_t next = 0;
      if (params.tickets == nullptr) {
        next = static_unit(round, cta, ctas);
      } else if (lane == 0) {
        next = ctas + static_cast<std::int32_t>(atomicAdd(&params.tickets->drawn, 1));
      }
      const Unit unit = schedule.unit(number);
      WarpSearch search{0, static_cast<std::int32_t>(schedule.rows.num_segments())};
#pragma unroll 1
      while (!search.done()) {
        const std::int32_t probe = search.probe(lane);
        const bool holds = lane == 0 || (probe < search.high && schedule.first_id(probe) <= unit.id);
        search.narrow(__popc(__ballot_sync(0xffffffff, holds)));
      }
      const Tile tile = schedule.tile(unit.id, search.low);
      if (lane == 0 && tile.length > 0) announce_heads(tile, unit.head);
      __syncwarp();
      number = __shfl_sync(0xffffffff, next, 0);
    }
    if (lane == 0) {
      shared.next = {};
      shared.next.tile.length = -1;
      announce();
    }
  }

  __device__ __forceinline__ void announce_heads(const Tile& tile, int first_head) {
    KeyTiles keys;
    if (tile.owned) keys = key_tiles<Traits::kBlockN>(params.mask, tile.length, tile.row, Traits::kBlockM);
    shared.next.tile = tile;
    shared.next.keys = keys;
#pragma unroll 1
    for (int i = 0; i < Traits::kConsumers; ++i) {
      shared.next.span[i] = tile.owned
                                ? key_span<Traits::kBlockN>(params.mask, tile.length, tile.row + 64 * i, 64, keys.begin)
                                : KeySpan{};
    }
    // Where all the keys fit, they are loaded once for all heads that share them.
    const bool fits =
        Traits::kKeepsKv && keys.count > 0 && keys.count <= Traits::kKStages && keys.count <= Traits::kVStages;
    const int end = first_head + params.unit_heads;
#pragma unroll 1
    for (int head = first_head; head < end; ++head) {
      shared.next.tile.head = head;
      shared.next.tile.keeps_kv = fits && head + 1 < end && (head + 1) / params.group == head / params.group;
      announce();
    }
  }

  __device__ __forceinline__ void announce() {
    Barrier::wait(&shared.q_empty[ring.index()], ring.empty_parity());
    shared.work[ring.index()] = shared.next;
    Barrier::arrive(&shared.work_full[ring.index()]);
    std::uint64_t* full = &shared.q_full[ring.index()];
    if (shared.next.keys.count > 0) {
      Barrier::arrive_and_expect_tx(full, sizeof(shared.q[0]));
#pragma unroll
      for (int block = 0; block < Traits::kBlocks; ++block) {
        load_box(params.q, full, shared.q[ring.index()][block], block * kBlockColumns, shared.next.tile.head,
                 shared.next.tile.begin, shared.next.tile.length, shared.next.tile.row);
      }
    } else {
      Barrier::arrive(full);
    }
    ring.advance();
  }
};

// One thread: loads the keys and values of the tiles that the scheduler hands on.
template <typename Traits>
struct Loader {
  const RaggedKernelParams& params;
  Shared<Traits>& shared;
  Ring<Traits::kQStages> ring;
  Ring<Traits::kKStages> k_ring;
  Ring<Traits::kVStages> v_ring;

  __device__ __forceinline__ void run() {
    bool loaded = false;  // the tile before had the same keys and values, and they are still there
    while (true) {
      Barrier::wait(&shared.work_full[ring.index()], ring.full_parity());
      const TileWork<Traits::kConsumers>& work = shared.work[ring.index()];
      if (work.tile.length < 0) return;
      const KeyTiles keys = work.keys;
      if (keys.count > 0 && !loaded) {
        const int kv_head = work.tile.head / params.group;
        const int begin = work.tile.begin, length = work.tile.length;
        const auto load_keys = [&](int t) {
          load(params.k, k_ring, shared.k, shared.k_full, shared.k_empty, kv_head, begin, length,
               keys.begin + t * Traits::kBlockN);
        };
        const auto load_values = [&](int t) {
          load(params.v, v_ring, shared.v, shared.v_full, shared.v_empty, kv_head, begin, length,
               keys.begin + t * Traits::kBlockN);
        };
        // In the order the consumers wait for them.
        load_keys(0);
#pragma unroll 1
        for (int t = 1; t < keys.count; ++t) {
          load_keys(t);
          load_values(t - 1);
        }
        load_values(keys.count - 1);
      }
      loaded = work.tile.keeps_kv;
      Barrier::arrive(&shared.q_empty[ring.index()]);  // `work` has been read
      ring.advance();
    }
  }

  template <typename Stages, typename Buffer>
  __device__ __forceinline__ void load(const CUtensorMap& map, Stages& to, Buffer& buffer, std::uint64_t* full,
                                       std::uint64_t* empty, int kv_head, int begin, int length, int key) {
    Barrier::wait(&empty[to.index()], to.empty_parity());
    Barrier::arrive_and_expect_tx(&full[to.index()], sizeof(buffer[0]));
#pragma unroll
    for (int block = 0; block < Traits::kBlocks; ++block) {
      load_box(map, &full[to.index()], buffer[to.index()][block], block * kBlockColumns, kv_head, begin, length, key);
    }
    to.advance();
  }
};

// One warpgroup: 64 rows of each tile.
template <typename Traits>
struct Consumer {
  using Element = typename Traits::Element;
  static constexpr int kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim, kConsumers = Traits::kConsumers;

  const RaggedKernelParams& params;
  Shared<Traits>& shared;
  int warpgroup;
  Ring<Traits::kQStages> q_ring;
  Ring<Traits::kKStages> k_ring;
  Ring<Traits::kVStages> v_ring;

  bool stores = false;  // the tile before still holds its Q stage
  float scores[kBlockN / 2];
  std::uint32_t probabilities[kBlockN / 4];  // pairs
  float output[kHeadDim / 2];

  __device__ __forceinline__ Consumer(const RaggedKernelParams& params_, Shared<Traits>& shared_)
      : params(params_),
        shared(shared_),
        // Known where it can be: the register is short with three CTAs.
        warpgroup(kConsumers == 1 ? 0 : __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0)) {}

  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32 % 4; }  // of the warpgroup
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ __forceinline__ void run() {
    if (Traits::kShape.turns && warpgroup == kConsumers - 1) pass_turn();  // the first turn is warpgroup 0's
    while (true) {
      Barrier::wait(&shared.q_full[q_ring.index()], q_ring.full_parity());
      const TileWork<kConsumers>& work = shared.work[q_ring.index()];
      if (work.tile.length < 0) break;
      compute(work);
      q_ring.advance();
    }
    if (stores) release_q(1);  // shared memory has to outlive the copies
  }

  // --- Turns: warpgroup w waits at barrier w for the one before it.

  __device__ __forceinline__ void take_turn() {
    if constexpr (Traits::kShape.turns) cutlass::arch::NamedBarrier::sync(256, kTurn + warpgroup);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (Traits::kShape.turns) {
      cutlass::arch::NamedBarrier::arrive(256, kTurn + (warpgroup + 1 == kConsumers ? 0 : warpgroup + 1));
    }
  }

  __device__ __forceinline__ static bool keeps_kv(const Tile& tile) { return Traits::kKeepsKv && tile.keeps_kv; }

  // --- Rings

  __device__ __forceinline__ void wait_k() { Barrier::wait(&shared.k_full[k_ring.index()], k_ring.full_parity()); }
  __device__ __forceinline__ void wait_v() { Barrier::wait(&shared.v_full[v_ring.index()], v_ring.full_parity()); }
  __device__ __forceinline__ void release_k(bool keep) {
    if (lane() == 0 && !keep) Barrier::arrive(&shared.k_empty[k_ring.index()]);
    k_ring.advance();
  }
  __device__ __forceinline__ void release_v(bool keep) {
    if (lane() == 0 && !keep) Barrier::arrive(&shared.v_empty[v_ring.index()]);
    v_ring.advance();
  }
  // A tile of keys that only other warpgroups need. It has to be waited for all the same: an arrival ahead of it would
  // count for the use before.
  __device__ __forceinline__ void skip_tile(bool keep) {
    wait_k();
    release_k(keep);
    wait_v();
    release_v(keep);
  }

  // --- Products, issued and committed; nothing waits here.

  // In the voted kernels the compiler does not see that all lanes have the same address: it would move descriptors to
  // uniform registers for each product.
  __device__ __forceinline__ static std::uint32_t uniform_address(const void* buffer) {
    const std::uint32_t address = shared_address(buffer);
    return Traits::kVoted ? __shfl_sync(0xffffffff, address, 0) : address;
  }

  __device__ __forceinline__ void issue_scores() {
    const std::uint64_t q = descriptor_k_major(uniform_address(shared.q[q_ring.index()][0][64 * warpgroup]));
    const std::uint64_t k = descriptor_k_major(uniform_address(shared.k[k_ring.index()]));
    pin(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const std::uint64_t in_block = descriptor_step(step % 4 * 32);
      wgmma_shared<Element, kBlockN>(scores, q + in_block + step / 4 * descriptor_step(sizeof(shared.q[0][0])),
                                     k + in_block + step / 4 * descriptor_step(sizeof(shared.k[0][0])), step > 0);
    }
    wgmma_commit();
    pin(scores);
  }

  __device__ __forceinline__ void issue_output(bool accumulate) {
    const std::uint64_t v = descriptor_across_k(uniform_address(shared.v[v_ring.index()]), sizeof(shared.v[0][0]));
    pin(output);
    pin(probabilities);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      wgmma_registers<Element, kHeadDim>(output, &probabilities[4 * step],
                                         v + step * descriptor_step(16 * kBlockRowBytes), accumulate || step > 0);
    }
    wgmma_commit();
    pin(output);
  }

  // --- One tile of queries

  // `work` stays in shared memory and is read where it is needed: registers are short.
  __device__ __forceinline__ void compute(const TileWork<kConsumers>& work) {
    OnlineSoftmax softmax(params.scale_log2);
    const KeySpan& span = work.span[warpgroup];
    const bool empty = span.first_tile == span.last_tile;
    const auto first_k = k_ring;
    const auto first_v = v_ring;
    // Every warpgroup takes a turn for each tile but the first, whatever it needs of the keys, and in step with them.
#pragma unroll 1
    for (int t = 0; t < span.first_tile; ++t) {
      skip_tile(keeps_kv(work.tile));
      take_turn();
      pass_turn();
    }
    if (!empty) {
      attend(work, softmax);
      softmax.finish();
    }
#pragma unroll 1
    for (int t = span.last_tile; t < work.keys.count; ++t) {
      if (t > 0) {
        take_turn();
        pass_turn();
      }
      skip_tile(keeps_kv(work.tile));
    }
    if (keeps_kv(work.tile)) {
      k_ring = first_k;
      v_ring = first_v;
    }
    if (stores) release_q(1);  // a tile without keys has not come past it
    if (work.tile.row + 64 * warpgroup < work.tile.length) {
      store(work.tile, softmax, empty);
    } else {
      cutlass::arch::NamedBarrier::sync(128, kEpilogue + warpgroup);  // all warps have read `work`
    }
    if constexpr (Traits::kQStages > 1) {
      stores = true;
    } else {
      release_q(0);
    }
  }

  // Two products in flight: the scores of a tile of keys and the output of the one before.
  __device__ __forceinline__ void attend(const TileWork<kConsumers>& work, OnlineSoftmax& softmax) {
    // Needed in every turn of the loop, where a read would be waited for; but at D 256 there are no registers for it.
    const std::conditional_t<(kHeadDim > 192), const KeySpan&, const KeySpan> span = work.span[warpgroup];
    const bool keep = keeps_kv(work.tile);
    float factor[2];
    int key = work.keys.begin + span.first_tile * kBlockN;
    wait_k();
    issue_scores();
    if (stores) release_q(1);
    wgmma_wait<0>();
    pin(scores);
    release_k(keep);
    mask(work.tile, span, key);
    softmax.template update<Traits::kVoted>(scores, factor);
    pack_all<Element>(scores, probabilities);
    bool accumulate = false, moved = false;
#pragma unroll 1
    for (int left = span.last_tile - span.first_tile - 1; left > 0; --left) {
      key += kBlockN;
      wait_k();
      take_turn();
      issue_scores();
      if (Traits::kVoted && moved) scale_rows(output, factor);
      wait_v();
      issue_output(accumulate);
      accumulate = true;
      pass_turn();
      wgmma_wait<1>();
      pin(scores);
      release_k(keep);
      mask(work.tile, span, key);
      // The assembler would bring this wait forward to here anyway, if not for the vote in the softmax. Held behind the
      // softmax it costs up to 5 % at D 64: it is other warpgroups' products that run meanwhile.
      if (!Traits::kVoted) finish_output(keep);
      moved = softmax.template update<Traits::kVoted>(scores, factor);
      if (Traits::kVoted) finish_output(keep);
      pack_all<Element>(scores, probabilities);
      if (!Traits::kVoted) scale_rows(output, factor);
    }
    if (Traits::kVoted && moved) scale_rows(output, factor);
    wait_v();
    issue_output(accumulate);
    finish_output(keep);
  }

  __device__ __forceinline__ void finish_output(bool keep) {
    wgmma_wait<0>();
    pin(output);
    pin(probabilities);
    release_v(keep);
  }

  // Of the thread's row r, 0 or 1: its number in the sequence.
  __device__ __forceinline__ int row_of(const Tile& tile, int r) const {
    return tile.row + 64 * warpgroup + 16 * warp() + lane() / 4 + 8 * r;
  }

  __device__ __forceinline__ void mask(const Tile& tile, const KeySpan& span, int key) {
    if (key >= span.full_begin && key + kBlockN <= span.full_end) return;
    int lo[2], hi[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = min(row_of(tile, r), tile.length - 1);
      const int column = key + lane() % 4 * 2;
      lo[r] = params.mask.lo(row, tile.length) - column;
      hi[r] = params.mask.hi(row, tile.length) - column;
    }
    mask_rows(scores, lo, hi);
  }

  // O / sum to shared memory, in Q's place, and on by TMA; the LSE straight from registers.
  __device__ __forceinline__ void store(const Tile& tile, const OnlineSoftmax& softmax, bool empty) {
    const float inverse[2] = {softmax.inverse(0), softmax.inverse(1)};
    scale_rows(output, inverse);
    // Where there were no keys, `output` is what the last tile left.
    const std::uint32_t written = empty ? 0 : 0xffffffff;
    if (params.lse != nullptr && lane() % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_of(tile, r);
        if (row < tile.length) {
          params.lse[(std::int64_t{tile.begin} + row) * params.lse_row_stride + tile.head * params.lse_head_stride] =
              softmax.lse(r);
        }
      }
    }
    cutlass::arch::NamedBarrier::sync(128, kEpilogue + warpgroup);  // the other warps' products have read Q
    // stmatrix: four 8 x 8 matrices, rows 0-7 and 8-15 of two chunks of 8 columns; lane i gives the address of row i %
    // 8 of matrix i / 8. The 16-byte chunks of a row are swizzled by the row.
    const int in_warp = lane() % 16;
    const int chunk_of_lane = lane() / 16;
    const std::uint32_t rows = shared_address(shared.q[q_ring.index()][0][64 * warpgroup + 16 * warp() + in_warp]);
#pragma unroll
    for (int chunk = 0; chunk < kHeadDim / 8; chunk += 2) {
      const std::uint32_t address =
          rows + chunk / 8 * sizeof(shared.q[0][0]) + (((chunk % 8 + chunk_of_lane) ^ (in_warp % 8)) * 16);
      const std::uint32_t a = pack<Element>(output[4 * chunk], output[4 * chunk + 1]) & written;
      const std::uint32_t b = pack<Element>(output[4 * chunk + 2], output[4 * chunk + 3]) & written;
      const std::uint32_t c = pack<Element>(output[4 * chunk + 4], output[4 * chunk + 5]) & written;
      const std::uint32_t d = pack<Element>(output[4 * chunk + 6], output[4 * chunk + 7]) & written;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                   "r"(c), "r"(d)
                   : "memory");
    }
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(128, kEpilogue + warpgroup);
    if (warp() == 0 && lane() == 0) {
#pragma unroll
      for (int block = 0; block < Traits::kBlocks; ++block) {
        store_box(params.out, shared.q[q_ring.index()][block][64 * warpgroup], block * kBlockColumns, tile.head,
                  tile.begin, tile.length, tile.row + 64 * warpgroup);
      }
      cute::tma_store_arrive();
    }
  }

  // The Q stage of `ago` tiles ago, by the thread that stores, once the copies have read it. Not at once: the other
  // warps would have to wait for this thread with their next product.
  __device__ __forceinline__ void release_q(std::uint32_t ago) {
    if (warp() == 0 && lane() == 0) {
      cute::tma_store_wait<0>();
      Barrier::arrive(&shared.q_empty[(q_ring.position - ago) % Traits::kQStages]);
    }
    stores = false;
  }
};

// What there is for this kernel to do.
enum Work : int { kTiles = 1, kTokens = 2, kTinySequences = 4, kAllWork = 7 };

// What this thread's segments ask for: all threads together see all segments.
template <typename Traits>
__device__ __forceinline__ int find_work(const typename Traits::Schedule& schedule) {
  const RaggedRows& rows = schedule.rows;
  constexpr int all = Traits::kLong ? kTiles : kAllWork;
  int found = 0;
  // Several at once: each is a round trip to memory. As many as registers allow.
  constexpr int kAtOnce = Traits::kShape.ctas > 2 ? 2 : (!Traits::kLong && Traits::kMovesRegisters ? 4 : 8);
  const std::int64_t segments = rows.num_segments();
#pragma unroll 1
  for (std::int64_t first = threadIdx.x; first < segments && found != all; first += kAtOnce * blockDim.x) {
    std::int64_t begin[kAtOnce], end[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int64_t segment = first + i * blockDim.x;
      begin[i] = rows.boundary(segment);
      end[i] = rows.boundary(segment + 1);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int64_t segment = first + i * blockDim.x, length = end[i] - begin[i];
      if (segment >= segments || length <= 0) continue;
      if (schedule.takes(length, rows.owned(segment))) found |= kTiles;
      if (!Traits::kLong && is_tiny(length, rows.owned(segment))) found |= length == 1 ? kTokens : kTinySequences;
    }
  }
  return found;
}

// By all warps of the grid; where registers have moved to the consumers, by theirs.
template <typename Traits>
struct TinySequences {
  using Sequence = TinySequence<typename Traits::Element, Traits::kHeadDim>;
  static constexpr int kWarps = Traits::kMovesRegisters ? 4 * Traits::kConsumers : Traits::kThreads / 32;

  const RaggedKernelParams& params;

  __device__ __forceinline__ void run(int work) const {
    if (work & kTokens) attend_tokens();
    if (work & kTinySequences) attend_others();
  }

  __device__ __forceinline__ static std::uint32_t warps() { return gridDim.x * kWarps; }
  __device__ __forceinline__ static std::uint32_t warp() { return blockIdx.x * kWarps + threadIdx.x / 32; }
  __device__ __forceinline__ std::uint32_t kv_heads() const {
    return static_cast<std::uint32_t>(params.num_heads / params.group);
  }

  // Those of one token.
  __device__ __forceinline__ void attend_tokens() const {
    const Sequence sequence(params);
    constexpr std::uint32_t kHeads = Sequence::kTokenHeads;
    const auto lane = static_cast<int>(threadIdx.x % 32);
    const std::uint32_t parts = (kv_heads() + kHeads - 1) / kHeads;
    const std::uint32_t tasks = static_cast<std::uint32_t>(params.rows.batch) * parts;
#pragma unroll 1
    for (std::uint32_t first = warp(); first < tasks; first += 32 * warps()) {
      // Every lane looks up one of the warp's next 32 tasks.
      const std::uint32_t task = first + lane * warps();
      RowRange range;
      if (task < tasks) range = params.rows.rows(task / parts + 1);
      const auto my_row = static_cast<int>(range.begin), my_head = static_cast<int>(task % parts * kHeads);
      std::uint32_t tokens = __ballot_sync(0xffffffff, range.size() == 1);
#pragma unroll 1
      while (tokens != 0) {
        // Two at a time: each is a round trip to memory.
        const int a = __ffs(static_cast<int>(tokens)) - 1;
        tokens &= tokens - 1;
        const bool two = tokens != 0;
        const int b = two ? __ffs(static_cast<int>(tokens)) - 1 : a;
        tokens &= two ? tokens - 1 : tokens;
        auto one = sequence.load_token(__shfl_sync(0xffffffff, my_row, a), __shfl_sync(0xffffffff, my_head, a),
                                       static_cast<int>(kv_heads()), true);
        auto other = sequence.load_token(__shfl_sync(0xffffffff, my_row, b), __shfl_sync(0xffffffff, my_head, b),
                                         static_cast<int>(kv_heads()), two);
        sequence.attend_token(one);
        sequence.attend_token(other);
      }
    }
  }

  __device__ __forceinline__ void attend_others() const {
    const Sequence sequence(params);
    const std::uint32_t tasks = static_cast<std::uint32_t>(params.rows.batch) * kv_heads();
    std::uint32_t task = warp();
    if (task >= tasks) return;
    RowRange range = params.rows.rows(task / kv_heads() + 1);
#pragma unroll 1
    while (true) {
      // The next one's rows are on their way meanwhile.
      const std::uint32_t next = task + warps();
      RowRange next_range;
      if (next < tasks) next_range = params.rows.rows(next / kv_heads() + 1);
      if (range.size() > 1 && is_tiny(range.size(), true)) {
        sequence.run(range.begin, static_cast<int>(range.size()), static_cast<int>(task % kv_heads()));
      }
      if (next >= tasks) return;
      task = next;
      range = next_range;
    }
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kShape.ctas)
    ragged_kernel(const __grid_constant__ RaggedKernelParams params) {
  static_assert(kFits<Traits>);
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<Traits>*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kQStages; ++i) {
      Barrier::init(&shared.work_full[i], 1);
      Barrier::init(&shared.q_full[i], 1);
      Barrier::init(&shared.q_empty[i], Traits::kConsumers + 1);
    }
    for (int i = 0; i < Traits::kKStages; ++i) {
      Barrier::init(&shared.k_full[i], 1);
      Barrier::init(&shared.k_empty[i], 4 * Traits::kConsumers);
    }
    for (int i = 0; i < Traits::kVStages; ++i) {
      Barrier::init(&shared.v_full[i], 1);
      Barrier::init(&shared.v_empty[i], 4 * Traits::kConsumers);
    }
    cutlass::arch::fence_barrier_init();
  }
  cudaTriggerProgrammaticLaunchCompletion();
  const typename Traits::Schedule schedule{params.rows, params.longest,    params.num_heads,
                                           params.band, params.unit_heads, params.longer};
  const int mine = find_work<Traits>(schedule);
  if constexpr (!Traits::kLong) {
    const int tokens = __syncthreads_or(mine & kTokens), others = __syncthreads_or(mine & kTinySequences);
    if (threadIdx.x == 0) shared.tiny = (tokens != 0 ? kTokens : 0) | (others != 0 ? kTinySequences : 0);
  }
  const bool tiles = __syncthreads_or(mine & kTiles);
  const bool consumes = threadIdx.x < 128 * Traits::kConsumers;
  if (tiles || (!Traits::kLong && shared.tiny != 0)) {
    if (!consumes) {
      if constexpr (Traits::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<Traits::kRegisters.producer>();
      const auto warp = static_cast<int>(threadIdx.x) / 32 - 4 * Traits::kConsumers;
      if (!tiles) {
        // nothing to load
      } else if (warp == kSchedulerWarp) {
        Scheduler<Traits>{params, shared}.run(schedule);
      } else if (warp == kLoaderWarp && threadIdx.x % 32 == 0) {
        Loader<Traits>{params, shared}.run();
      }
    } else {
      if constexpr (Traits::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<Traits::kRegisters.consumer>();
      if (tiles) Consumer<Traits>(params, shared).run();
      if constexpr (!Traits::kLong && Traits::kMovesRegisters) {
        __syncwarp();  // one thread may come later, from its last store
        TinySequences<Traits>{params}.run(shared.tiny);
      }
    }
    if constexpr (!Traits::kLong && !Traits::kMovesRegisters) {
      __syncwarp();
      TinySequences<Traits>{params}.run(shared.tiny);
    }
  }
  if (threadIdx.x == 128 * Traits::kConsumers && params.tickets != nullptr) {  // the thread that drew
    __threadfence();
    if (atomicInc(&params.tickets->left, gridDim.x - 1) == gridDim.x - 1) params.tickets->drawn = 0;
  }
  // The kernel before this one may still be at work; whatever comes next on the stream waits for this one alone.
  cudaGridDependencySynchronize();
}

template <typename Traits>
void launch_ragged(const RaggedParams& params, std::int32_t longer, std::int32_t longest, bool beside, int device,
                   StreamHandle stream) {
  RaggedKernelParams kernel_params;
  const bool is_bfloat16 = params.dtype == kBFloat16;
  const auto encode = [&](CUtensorMap* map, const void* data, std::int64_t row_stride, std::int64_t head_stride,
                          std::int32_t heads, std::int32_t box_rows) {
    encode_ragged(map, data, {row_stride, head_stride, heads, params.head_dim, box_rows, is_bfloat16});
  };
  encode(&kernel_params.q, params.q.data, params.q.row_stride, params.q.head_stride, params.num_q_heads,
         Traits::kBlockM);
  encode(&kernel_params.k, params.k.data, params.k.row_stride, params.k.head_stride, params.num_kv_heads,
         Traits::kBlockN);
  encode(&kernel_params.v, params.v.data, params.v.row_stride, params.v.head_stride, params.num_kv_heads,
         Traits::kBlockN);
  encode(&kernel_params.out, params.out, params.out_row_stride, params.out_head_stride, params.num_q_heads, 64);
  kernel_params.q_rows = params.q;
  kernel_params.k_rows = params.k;
  kernel_params.v_rows = params.v;
  kernel_params.out_data = params.out;
  kernel_params.out_row_stride = params.out_row_stride;
  kernel_params.out_head_stride = params.out_head_stride;
  kernel_params.lse = params.lse;
  kernel_params.lse_row_stride = params.lse_row_stride;
  kernel_params.lse_head_stride = params.lse_head_stride;
  kernel_params.rows = params.rows;
  kernel_params.mask = params.mask;
  kernel_params.scale_log2 = params.scale * kLog2E;
  kernel_params.num_heads = params.num_q_heads;
  kernel_params.group = params.group();
  kernel_params.head_dim = params.head_dim;
  kernel_params.tickets = next_ticket_counter(device, stream);
  // In a fixed order, bands would upset the balance between CTAs more than they save.
  kernel_params.band = kernel_params.tickets == nullptr ? params.num_q_heads
                                                        : heads_in_band(params.rows, params.mask, params.num_kv_heads,
                                                                        params.group(), params.head_dim);
  kernel_params.longer = longer;
  kernel_params.longest = longest;
  typename Traits::Schedule schedule{params.rows, longest, params.num_q_heads, kernel_params.band, 1};
  const int resident = cuda_device_info(device).num_multiprocessors * Traits::kShape.ctas;
  // Several heads a unit share a search and perhaps their keys; but there has to be work for everybody.
  const bool alike = !Traits::kLong || params.rows.likely_longest(params.longest_hint) <= kAlikeRows;
  const int most_heads = alike ? Traits::kShape.unit_heads : 1;
  for (int heads = 2; heads <= most_heads; ++heads) {
    if (schedule.num_ids() * params.num_q_heads / heads < 16 * resident) break;
    if (kernel_params.band % heads == 0 && (params.group() % heads == 0 || heads % params.group() == 0)) {
      schedule.unit_heads = heads;
    }
  }
  kernel_params.unit_heads = schedule.unit_heads;
  const std::int64_t ctas = std::min<std::int64_t>(schedule.num_units(), resident);
  launch<ragged_kernel<Traits>>(kernel_params, ctas, Traits::kThreads, sizeof(Shared<Traits>), device,
                                static_cast<cudaStream_t>(stream), "launching ragged_flash_attention", beside);
}

template <typename Element, int kHeadDim>
void launch_ragged_long(const RaggedParams& params, std::int32_t longer, bool beside, int device, StreamHandle stream) {
  launch_ragged<RaggedTraits<Element, kHeadDim, true>>(params, longer, kAnyLength, beside, device, stream);
}

template <typename Element, int kHeadDim>
void launch_ragged_short(const RaggedParams& params, std::int32_t longest, bool beside, int device,
                         StreamHandle stream) {
  launch_ragged<RaggedTraits<Element, kHeadDim, false>>(params, 0, longest, beside, device, stream);
}

}  // namespace ragged_attention::sm90
