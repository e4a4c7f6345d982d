// Attention over selected tokens for sequences of one row (decode), bfloat16 and float16, on Hopper.
//
// A unit of work is a sequence and one kv head: up to 16 query heads, the rows of an mma.sync. row_plan.h says how the
// list is dealt out. Each of eight warps works for itself, a round at a time:
//   1. K of its tile has arrived by cp.async: S = Q K^T; K of a later round is sent for.
//   2. S goes to the same warp of every CTA of the cluster, through distributed shared memory, and theirs come here.
//   3. Online softmax over the tiles of the round, in the order of the chain.
//   4. V has arrived, this CTA's columns of all those tiles: O += P V; V of a later round is sent for.
// At the end the eight chains are merged in the order of warps. Reads that wait for each other are what a short batch
// takes its time for, so everything that can be guessed is read at once: in decode row i is sequence i's.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "common/cuda/launch.h"
#include "common/cuda_host.h"
#include "qsa_sparse_attention/sm90/launch.h"
#include "qsa_sparse_attention/sm90/merge.cuh"
#include "qsa_sparse_attention/sm90/params.cuh"
#include "qsa_sparse_attention/sm90/row_plan.h"
#include "ragged_flash_attention/sm90/softmax.cuh"

namespace ragged_attention::sm90 {

struct QsaRowsParams {
  portable::QsaKernelParams call;
  float scale_log2 = 0.0f;       // scale * log2(e)
  std::int32_t page_shift = -1;  // log2 of the page size where that is a whole number
  std::int32_t longest = 0;      // tokens that a page table has room for
  std::int64_t num_units = 0;    // sequences times kv heads
};

template <typename Element_, int kHeadDim_, int kCtas_>
struct QsaRowTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kCtas = kCtas_;
  static constexpr int kColumns = kHeadDim / kCtas;  // of V, that a CTA sums
  static constexpr int kStagesK = RowStages<kHeadDim, kCtas>::kK, kStagesV = RowStages<kHeadDim, kCtas>::kV;
  static_assert(kStagesV == kStagesK || kStagesV == kStagesK - 1);
  // Groups of copies that may still be on their way when a round's K, or its V, has to be there. (Where there are fewer
  // stages of V, it is sent for after the next round's K.)
  static constexpr int kBehindK = kStagesK + kStagesV - 1, kBehindV = kBehindK - (kStagesK - kStagesV);
  static constexpr int kPieceBytes = kRowTile * kHeadDim * 2;
  static constexpr int kRoundTokens = kRowTile * kCtas;
  static constexpr int kThreads = 32 * kRowWarps;
};

template <typename Traits>
struct QsaRowShared {
  static constexpr int kPartialStride = Traits::kColumns + 4;  // columns; the 4 spread rows over the banks
  struct Warp {
    alignas(128) unsigned char k[Traits::kStagesK][Traits::kPieceBytes];
    alignas(128) unsigned char v[Traits::kStagesV][Traits::kPieceBytes];
    // Scores of a round's tiles, as the accumulator's registers: of every lane two times 16 bytes.
    alignas(16) float4 scores[Traits::kCtas > 1 ? Traits::kCtas : 1][2][32];
  };
  union {
    Warp warps[kRowWarps];
    struct {
      float outputs[kRowWarps][kRowMostHeads][kPartialStride];
      float maxima[kRowWarps][kRowMostHeads], sums[kRowWarps][kRowMostHeads];
    } parts;
  };
  alignas(128) unsigned char q[kRowMostHeads * Traits::kHeadDim * 2];
  // Where the tokens of a round lie, in bytes from the first of head 0 on.
  std::int64_t token_at[kRowWarps][Traits::kStagesK][Traits::kRoundTokens];
  std::uint64_t scores_full[kRowWarps];   // by bytes
  std::uint64_t scores_empty[kRowWarps];  // by each CTA
};

// To the shared memory of a CTA of the cluster, where `barrier` counts the bytes.
__device__ __forceinline__ void send(std::uint32_t to, std::uint32_t barrier, float4 value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
               : "memory");
}

template <typename Traits>
struct QsaRowWarp {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim, kCtas = Traits::kCtas, kColumns = Traits::kColumns;
  static constexpr int kStagesK = Traits::kStagesK, kStagesV = Traits::kStagesV;
  static constexpr int kLookups = (Traits::kRoundTokens + 31) / 32;  // tokens of a round that are a lane's to look up
  static constexpr std::int32_t kNone = -1;                          // no token
  static constexpr std::int64_t kNowhere = INT64_MIN;

  const QsaRowsParams& params;
  QsaRowShared<Traits>& shared;
  int warp, lane, rank;
  std::uint32_t exchanges = 0;  // so far

  // The row at hand.
  std::int32_t row, sequence, kv_head, length, count, rounds, chain;
  std::int32_t entries[kLookups];  // of the round after the next to be looked up
  struct Page {
    std::uint32_t low, high;
  } pages[kLookups];  // of the next round to be looked up, still on their way
  std::int32_t tokens[kLookups];

  float maximum[2], sum[2];  // of the scaled scores, in units of log2; this thread's part of the sum
  float output[kColumns / 8][4];

  __device__ __forceinline__ const QsaParams& call() const { return params.call.params; }

  // --- Lookups. Token i of a round is entry i % 16 of its tile i / 16.

  __device__ __forceinline__ std::int64_t entry_at(std::int32_t round, int i) const {
    const int token = 32 * i + lane;
    if (token >= Traits::kRoundTokens) return INT64_MAX;
    return row_tile_begin(std::int64_t{round} * kCtas + token / kRowTile, warp) + token % kRowTile;
  }

  __device__ __forceinline__ void read_entries(std::int32_t round, std::int32_t of_row,
                                               std::int32_t (&to)[kLookups]) const {
    const std::int32_t* list = call().token_indices + of_row * call().token_indices_row_stride;
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const std::int64_t at = entry_at(round, i);
      to[i] = at < call().selection_width ? list[at] : kNone;
    }
  }

  __device__ __forceinline__ std::int32_t slot_of(std::int32_t token) const {
    if (params.page_shift >= 0) return token >> params.page_shift;
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(token) /
                                     static_cast<std::uint32_t>(call().cache.page_size));
  }

  // The entries become tokens, where the row lists them, and their pages are read.
  __device__ __forceinline__ void read_pages(std::int32_t round, const std::int32_t (&from)[kLookups],
                                             std::int32_t (&token)[kLookups], Page (&page)[kLookups]) const {
    const IntegerMatrix& table = call().cache.lookup_table;
    const auto* words = static_cast<const std::uint32_t*>(table.row0.data);
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const bool listed = entry_at(round, i) < count && static_cast<std::uint32_t>(from[i]) <
                                                            static_cast<std::uint32_t>(length);
      token[i] = listed ? from[i] : kNone;
      page[i] = {0xffffffffu, 0u};
      if (!listed) continue;
      const std::int64_t at = sequence * table.row_stride + slot_of(token[i]) * table.row0.stride;
      if (table.row0.type == IntegerType::kI64) {
        page[i].low = words[2 * at];
        page[i].high = words[2 * at + 1];
      } else {
        page[i].low = words[at];
      }
    }
  }

  __device__ __forceinline__ void place(std::int32_t round, const std::int32_t (&token)[kLookups],
                                        const Page (&page)[kLookups]) const {
    const PagedCache& cache = call().cache;
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      if (32 * i + lane >= Traits::kRoundTokens) continue;
      const bool exists = token[i] != kNone && page[i].high == 0 &&
                          page[i].low < static_cast<std::uint64_t>(cache.num_pages);
      const std::int32_t within = token[i] - slot_of(token[i]) * static_cast<std::int32_t>(cache.page_size);
      shared.token_at[warp][round % kStagesK][32 * i + lane] =
          exists ? 2 * (kv_head * cache.head_stride + page[i].low * cache.page_stride + within * cache.token_stride)
                 : kNowhere;
    }
    __syncwarp();
  }

  // --- The gather

  // Rows of kChunks chunks to a piece, side by side in global memory; zeros where there is no token.
  template <int kChunks>
  __device__ __forceinline__ void gather(void* piece, const char* from, const std::int64_t* token_at) const {
    const std::uint32_t to = shared_address(piece);
    constexpr int kRows = 32 / kChunks;  // at once
    const char* chunk = from + lane % kChunks * 16;
#pragma unroll 4  // all places at once would be kept from round to round, and take too many registers
    for (int i = 0; i < kHeadDim / 16; ++i) {
      const int at = i * kRows + lane / kChunks;
      const std::int64_t offset = token_at[at];
      const bool exists = offset != kNowhere;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + piece_offset<kChunks>(at, lane % kChunks)),
                   "l"(exists ? chunk + offset : from), "r"(exists ? 16 : 0)
                   : "memory");
    }
  }
  __device__ __forceinline__ static void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int kBehind>
  __device__ __forceinline__ static void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kBehind) : "memory");
    __syncwarp();
  }

  __device__ __forceinline__ typename QsaRowShared<Traits>::Warp& mine() const { return shared.warps[warp]; }

  // A group of copies for every round, so that counting them says which have landed; behind the last round it is empty.
  __device__ __forceinline__ void send_for_k(std::int32_t round) const {
    if (round < rounds) {
      gather<kHeadDim / 8>(mine().k[round % kStagesK], static_cast<const char*>(call().cache.k),
                           shared.token_at[warp][round % kStagesK] + rank * kRowTile);
    }
    commit();
  }
  __device__ __forceinline__ void send_for_v(std::int32_t round) const {
    if (round < rounds) {
      gather<kColumns / 8>(mine().v[round % kStagesV], static_cast<const char*>(call().cache.v) + rank * kColumns * 2,
                           shared.token_at[warp][round % kStagesK]);
    }
    commit();
  }

  // --- The products

  __device__ __forceinline__ static void load_four(std::uint32_t address, std::uint32_t (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }
  __device__ __forceinline__ static void load_four_transposed(std::uint32_t address, std::uint32_t (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }
  __device__ __forceinline__ static void load_two_transposed(std::uint32_t address, std::uint32_t (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
  }
  __device__ __forceinline__ static void multiply(float* d, const std::uint32_t (&a)[4], std::uint32_t b0,
                                                  std::uint32_t b1) {
    if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
      cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, d[0], d[1],
                                                d[2], d[3]);
    } else {
      cute::SM80_16x8x16_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2],
                                              d[3]);
    }
  }

  // Of this CTA's tile of a round: 16 tokens, two blocks of eight columns. Scaled; -inf where there is no token.
  __device__ __forceinline__ void scores_of(std::int32_t round, float (&scores)[8]) const {
    constexpr int kChunks = kHeadDim / 8;
    const bool exists = lane < kRowTile &&
                        shared.token_at[warp][round % kStagesK][rank * kRowTile + lane % kRowTile] != kNowhere;
    const std::uint32_t listed = __ballot_sync(0xffffffff, exists) >> (lane % 4 * 2);
    const std::uint32_t q = shared_address(shared.q), k = shared_address(mine().k[round % kStagesK]);
    const int q_row = lane % 16, k_row = lane % 8 + lane / 16 * 8;
    float parts[2][8];  // two chains of products instead of one
#pragma unroll
    for (int i = 0; i < 8; ++i) parts[0][i] = parts[1][i] = 0.0f;
#pragma unroll 4  // as in gather()
    for (int step = 0; step < kHeadDim / 16; ++step) {
      std::uint32_t a[4], b[4];
      load_four(q + piece_offset<kChunks>(q_row, 2 * step + lane / 16), a);
      load_four(k + piece_offset<kChunks>(k_row, 2 * step + lane / 8 % 2), b);
      multiply(&parts[step % 2][0], a, b[0], b[1]);
      multiply(&parts[step % 2][4], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool is_listed = (listed >> (i / 4 * 8 + i % 2) & 1) != 0;
      scores[i] = is_listed ? (parts[0][i] + parts[1][i]) * params.scale_log2 : -INFINITY;
    }
  }

  // What every CTA has of a round; `mine` is this one's tile.
  __device__ __forceinline__ void exchange(const float (&own)[8], float (&scores)[kCtas][8], bool last) {
    const std::uint32_t parity = exchanges % 2;
    // All have read what was there before.
    if (exchanges > 0) Barrier::wait(&shared.scores_empty[warp], parity ^ 1);
    if (lane == 0) Barrier::arrive_and_expect_tx(&shared.scores_full[warp], kCtas * sizeof(mine().scores[0]));
    const std::uint32_t to = shared_address(&mine().scores[rank][0][lane]);
    const std::uint32_t barrier = shared_address(&shared.scores_full[warp]);
    const float4 low = make_float4(own[0], own[1], own[2], own[3]), high = make_float4(own[4], own[5], own[6], own[7]);
#pragma unroll 1
    for (int i = 0; i < kCtas; ++i) {
      const std::uint32_t cta = (rank + i) % kCtas;
      const std::uint32_t there = cute::set_block_rank(to, cta), its_barrier = cute::set_block_rank(barrier, cta);
      send(there, its_barrier, low);
      send(there + static_cast<std::uint32_t>(sizeof(mine().scores[0][0])), its_barrier, high);
    }
    Barrier::wait(&shared.scores_full[warp], parity);
#pragma unroll
    for (int i = 0; i < kCtas; ++i) {
      const float4 first = mine().scores[i][0][lane], second = mine().scores[i][1][lane];
      scores[i][0] = first.x, scores[i][1] = first.y, scores[i][2] = first.z, scores[i][3] = first.w;
      scores[i][4] = second.x, scores[i][5] = second.y, scores[i][6] = second.z, scores[i][7] = second.w;
    }
    ++exchanges;
    if (last) return;  // nobody waits any more, and some may have left
    __syncwarp();
    if (lane < kCtas) Barrier::arrive(&shared.scores_empty[warp], lane, 1);
  }

  // One tile's scores become weights, `sum` one of the new maximum.
  __device__ __forceinline__ void update(float (&scores)[8], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float tile = fmaxf(fmaxf(scores[2 * r], scores[2 * r + 1]), fmaxf(scores[4 + 2 * r], scores[5 + 2 * r]));
      const float largest = fmaxf(maximum[r], quad_max(tile));
      const float offset = largest == -INFINITY ? 0.0f : largest;  // -inf - -inf would be NaN
      factor[r] = exp2_approximate(maximum[r] - offset);
      maximum[r] = largest;
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[4 * i + 2 * r + e];
          score = exp2_approximate(score - offset);
          total += score;
        }
      }
      sum[r] = __fmaf_rn(sum[r], factor[r], total);
    }
  }

  __device__ __forceinline__ void add_values(std::uint32_t v, int tile, const float (&weights)[8]) {
    constexpr int kChunks = kColumns / 8;
    const std::uint32_t a[4] = {pack<Element>(weights[0], weights[1]), pack<Element>(weights[2], weights[3]),
                                pack<Element>(weights[4], weights[5]), pack<Element>(weights[6], weights[7])};
    const int row = tile * kRowTile + lane % 16;
    if constexpr (kChunks == 1) {
      std::uint32_t b[4];
      load_two_transposed(v + piece_offset<1>(row, 0), b);
      multiply(output[0], a, b[0], b[1]);
    } else {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += 2) {
        std::uint32_t b[4];
        load_four_transposed(v + piece_offset<kChunks>(row, chunk + lane / 16), b);
        multiply(output[chunk], a, b[0], b[1]);
        multiply(output[chunk + 1], a, b[2], b[3]);
      }
    }
  }

  // --- A row

  __device__ __forceinline__ void load_q() const {
    constexpr int kChunks = kHeadDim / 8;
    const int heads = call().group();
    for (int i = static_cast<int>(threadIdx.x); i < kRowMostHeads * kChunks; i += Traits::kThreads) {
      const int head = i / kChunks, chunk = i % kChunks;
      const auto* from = static_cast<const Element*>(call().q) + row * call().q_row_stride +
                         (kv_head * heads + (head < heads ? head : 0)) * call().q_head_stride + chunk * 8;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared.q) +
                                                                        piece_offset<kChunks>(head, chunk)),
                   "l"(from), "r"(head < heads ? 16 : 0)
                   : "memory");
    }
  }

  // `entries` are those of the first kStagesK + 1 rounds.
  __device__ __forceinline__ void begin(const std::int32_t (&first)[kStagesK + 1][kLookups]) {
    chain = row_chain(count, warp);
    rounds = (chain + kCtas - 1) / kCtas;
    Page page[kStagesK][kLookups];
    std::int32_t token[kStagesK][kLookups];
#pragma unroll
    for (int round = 0; round < kStagesK; ++round) read_pages(round, first[round], token[round], page[round]);
    load_q();  // lands with the first K
#pragma unroll
    for (int round = 0; round < kStagesK; ++round) {
      place(round, token[round], page[round]);
      send_for_k(round);
      if (round < kStagesV) send_for_v(round);
    }
    read_pages(kStagesK, first[kStagesK], tokens, pages);
    read_entries(kStagesK + 1, row, entries);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = -INFINITY;
      sum[r] = 0.0f;
    }
#pragma unroll
    for (auto& block : output) block[0] = block[1] = block[2] = block[3] = 0.0f;
  }

  __device__ __forceinline__ void step(std::int32_t round) {
    float scores[kCtas][8];
    wait_for_copies<Traits::kBehindK>();
    {
      float own[8];
      scores_of(round, own);
      __syncwarp();  // K and the places of its tokens have been read
      place(round + kStagesK, tokens, pages);
      send_for_k(round + kStagesK);
      read_pages(round + kStagesK + 1, entries, tokens, pages);
      read_entries(round + kStagesK + 2, row, entries);
      if constexpr (kCtas > 1) {
        exchange(own, scores, round + 1 == rounds);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) scores[0][i] = own[i];
      }
    }
    float factor[kCtas][2];
#pragma unroll
    for (int tile = 0; tile < kCtas; ++tile) update(scores[tile], factor[tile]);
    wait_for_copies<Traits::kBehindV>();
    const std::uint32_t v = shared_address(mine().v[round % kStagesV]);
#pragma unroll
    for (int tile = 0; tile < kCtas; ++tile) {
      if (round * kCtas + tile >= chain) break;
      // A maximum that stays, as most do, gives a factor of exactly 1.
      if (__any_sync(0xffffffff, factor[tile][0] != 1.0f || factor[tile][1] != 1.0f)) {
#pragma unroll
        for (auto& block : output) {
#pragma unroll
          for (int i = 0; i < 4; ++i) block[i] *= factor[tile][i / 2];
        }
      }
      add_values(v, tile, scores[tile]);
    }
    __syncwarp();  // V has been read
    send_for_v(round + kStagesV);
  }

  // The chains, in the order of warps.
  __device__ __forceinline__ void store() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();  // nobody needs the pieces any more
    const int heads = call().group();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = quad_sum(sum[r]);
      const int head = lane / 4 + 8 * r;
      if (head >= heads) continue;
      if (lane % 4 == 0) {
        shared.parts.maxima[warp][head] = maximum[r];
        shared.parts.sums[warp][head] = total;
      }
      float* to = shared.parts.outputs[warp][head] + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        *reinterpret_cast<float2*>(to + 8 * i) = make_float2(output[i][2 * r], output[i][2 * r + 1]);
      }
    }
    __syncthreads();
    constexpr int kFours = kColumns / 4;
    for (int i = static_cast<int>(threadIdx.x); i < heads * kFours; i += Traits::kThreads) {
      const int head = i / kFours, column = i % kFours * 4;
      RowParts<kRowWarps> parts;
#pragma unroll
      for (int w = 0; w < kRowWarps; ++w) {
        parts.maxima[w] = shared.parts.maxima[w][head];
        parts.sums[w] = shared.parts.sums[w][head];
        parts.outputs[w] = *reinterpret_cast<const float4*>(shared.parts.outputs[w][head] + column);
      }
      parts.store(params.call, row, kv_head * heads + head, rank * kColumns + column);
    }
    __syncthreads();  // before the next row's pieces arrive
  }
};

// Rows before the first sequence and after the last get 0 and -inf.
template <typename Traits>
__device__ __forceinline__ void store_rows_of_none(const QsaRowsParams& params, std::int64_t first_end,
                                                   std::int64_t last_begin) {
  const QsaParams& call = params.call.params;
  const std::int64_t rows = first_end + (call.rows.total - last_begin);
  constexpr int kFours = Traits::kHeadDim / 4;
  for (std::int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
    const std::int64_t row = i < first_end ? i : last_begin + (i - first_end);
    for (int j = static_cast<int>(threadIdx.x); j < call.num_q_heads * kFours; j += Traits::kThreads) {
      portable::store_four(params.call, row, j / kFours, j % kFours * 4, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
      if (call.lse != nullptr && j % kFours == 0) {
        call.lse[row * call.lse_row_stride + j / kFours * call.lse_head_stride] = -INFINITY;
      }
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) qsa_rows_kernel(const __grid_constant__ QsaRowsParams params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<QsaRowShared<Traits>*>(shared_bytes);
  constexpr int kCtas = Traits::kCtas, kStagesK = Traits::kStagesK;
  using Warp = QsaRowWarp<Traits>;
  if constexpr (kCtas > 1) {
    if (threadIdx.x < kRowWarps) {
      Barrier::init(&shared.scores_full[threadIdx.x], 1);
      Barrier::init(&shared.scores_empty[threadIdx.x], kCtas);
      cutlass::arch::fence_barrier_init();
    }
    cute::cluster_arrive();
  }
  cudaTriggerProgrammaticLaunchCompletion();

  const QsaParams& call = params.call.params;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Warp warp{params, shared, static_cast<int>(threadIdx.x) / 32, lane, static_cast<int>(blockIdx.x) % kCtas};
  const std::int64_t step = gridDim.x / kCtas;
  std::int64_t next = blockIdx.x / kCtas;

  // A guess, read while it is being found out: the sequence's row has its number.
  std::int32_t entries[kStagesK + 1][Warp::kLookups];
  const auto guess = static_cast<std::int32_t>(min(next / call.num_kv_heads, call.rows.total - 1));
#pragma unroll
  for (int round = 0; round <= kStagesK; ++round) warp.read_entries(round, guess, entries[round]);
  const auto guessed_count = static_cast<std::int32_t>(call.count(guess));
  const std::int64_t none_before = call.rows.boundary(1), none_after = call.rows.boundary(call.rows.batch + 1);
  bool waits = kCtas > 1;  // for the cluster's barriers
  while (next < params.num_units) {
    // Each lane looks at a unit: there may be many, and most of them none of this kernel's.
    const std::int64_t mine = next + step * lane;
    std::int32_t row = 0, length = 0;
    bool single = false;
    if (mine < params.num_units) {
      const std::int64_t sequence = mine / call.num_kv_heads;
      const RowRange range = call.rows.rows(sequence + 1);
      const std::int64_t visible = visible_length(call.cache_lengths[sequence], 1);
      single = range.size() == 1;
      row = static_cast<std::int32_t>(range.begin);
      length = static_cast<std::int32_t>(visible < params.longest ? visible : params.longest);
    }
    const std::uint32_t found = __ballot_sync(0xffffffff, single);
    if (found == 0) {
      next += 32 * step;
      continue;
    }
    const int first = __ffs(static_cast<int>(found)) - 1;
    const std::int64_t unit = next + step * first;
    warp.row = __shfl_sync(0xffffffff, row, first);
    warp.length = __shfl_sync(0xffffffff, length, first);
    warp.sequence = static_cast<std::int32_t>(unit / call.num_kv_heads);
    warp.kv_head = static_cast<std::int32_t>(unit % call.num_kv_heads);
    const bool right = warp.row == guess;
    warp.count = right ? guessed_count : static_cast<std::int32_t>(call.count(warp.row));
    if (!right || next != blockIdx.x / kCtas || first != 0) {
#pragma unroll
      for (int round = 0; round <= kStagesK; ++round) warp.read_entries(round, warp.row, entries[round]);
    }
    next = unit + step;
    warp.begin(entries);
    warp.template wait_for_copies<Traits::kBehindK>();
    __syncthreads();  // every thread's part of Q is there
    if (waits) cute::cluster_wait();
    waits = false;
#pragma unroll 1
    for (std::int32_t round = 0; round < warp.rounds; ++round) warp.step(round);
    warp.store();
    if constexpr (kCtas > 1) break;
  }
  if (waits) cute::cluster_wait();
  if (none_before > 0 || none_after < call.rows.total) {
    store_rows_of_none<Traits>(params, none_before, max(none_before, none_after));
  }
  // The kernel before this one may still be at work; whatever comes next on the stream waits for this one alone.
  cudaGridDependencySynchronize();
}

template <typename Traits>
void launch_qsa_rows_as(const QsaRowsParams& params, bool beside, int device, StreamHandle stream) {
  // All of a cluster's CTAs look at one unit only: they could not tell when the others have left.
  const std::int64_t units = std::max<std::int64_t>(params.num_units, 1);
  const std::int64_t ctas =
      Traits::kCtas > 1 ? units * Traits::kCtas
                        : std::min<std::int64_t>(units, 4 * cuda_device_info(device).num_multiprocessors);
  launch<qsa_rows_kernel<Traits>>(params, ctas, Traits::kThreads, sizeof(QsaRowShared<Traits>), device,
                                  static_cast<cudaStream_t>(stream), "launching qsa_sparse_attention", beside,
                                  Traits::kCtas);
}

template <typename Element, int kHeadDim>
void launch_qsa_rows(const portable::QsaKernelParams& call, bool beside, int device, StreamHandle stream) {
  const QsaParams& params = call.params;
  QsaRowsParams kernel_params;
  kernel_params.call = call;
  kernel_params.scale_log2 = params.scale * kLog2E;
  kernel_params.page_shift = page_shift(params.cache);
  kernel_params.longest = longest_context(params.cache);
  kernel_params.num_units = params.rows.batch * params.num_kv_heads;
  switch (row_ctas(kernel_params.num_units, cuda_device_info(device).num_multiprocessors)) {
    case 1:
      return launch_qsa_rows_as<QsaRowTraits<Element, kHeadDim, 1>>(kernel_params, beside, device, stream);
    case 2:
      return launch_qsa_rows_as<QsaRowTraits<Element, kHeadDim, 2>>(kernel_params, beside, device, stream);
    case 4:
      return launch_qsa_rows_as<QsaRowTraits<Element, kHeadDim, 4>>(kernel_params, beside, device, stream);
    default:
      return launch_qsa_rows_as<QsaRowTraits<Element, kHeadDim, 8>>(kernel_params, beside, device, stream);
  }
}

}  // namespace ragged_attention::sm90
