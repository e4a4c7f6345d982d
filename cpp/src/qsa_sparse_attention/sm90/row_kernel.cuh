// Attention over selected tokens for sequences of few rows (decode, multi-token prediction), row by row, for bfloat16
// and float16 on Hopper.
//
// A unit of work is a row and one kv head: up to 16 query heads, the rows of an mma.sync. row_plan.h says how its list
// is dealt out to eight chains of tiles.
//   Producer warps, eight, each for a consumer warp: look up the tokens of its tiles, those of two rounds at once, a
//   token a lane, and gather K and V of a tile by cp.async as soon as there is room: pieces, in a ring.
//   Consumer warps, eight, kCtas of them to a chain, in step, a round of kCtas tiles at a time: S = Q K^T of a tile
//   each; exchange of the tiles' maxima, then of the weights and their sums: an online softmax, tile by tile; O += P V
//   of all the round's tiles, each warp its columns.
// At the end the chains are merged in their order, across the cluster through distributed shared memory.
//
// Rows of a sequence follow each other, so that what they share is read from DRAM once, and from L2 after that. Reads
// that wait for each other are what a short batch takes its time for, so a row's sequence is guessed: all have as many
// rows.
#pragma once

#include <cooperative_groups.h>

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
  std::int32_t num_units = 0;    // rows times kv heads
  std::int32_t num_clusters = 0;
  bool sparse = false;  // probably there is nothing for this kernel
};

template <typename Element_, int kHeadDim_, int kCtas_>
struct QsaRowTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kCtas = kCtas_;
  static constexpr int kChains = kRowChains / kCtas;  // of a CTA
  static constexpr int kColumns = kHeadDim / kCtas;   // of O, that are a warp's
  static constexpr int kPitch = kRowPitch<kHeadDim>;  // bytes from token to token, and from head to head
  static constexpr int kPieces = kRowPieces<kHeadDim>;
  static constexpr bool kKeepsQ = kCtas > 1;  // in registers: there is room where O has fewer columns
  static constexpr int kConsumers = 32 * kRowChains, kThreads = 2 * kConsumers;
  // As much as the launch allocates: 128 for every thread.
  static constexpr int kConsumerRegisters = 184, kProducerRegisters = 72;
};

// What is computed at a time.
struct QsaRowUnit {
  std::int32_t row, kv_head;
};

template <typename Traits>
struct QsaRowShared {
  static constexpr int kPartialStride = Traits::kHeadDim + 8;  // columns; the 8 spread four rows over the banks
  union {
    alignas(128) unsigned char pieces[kRowChains][Traits::kPieces][kRowTile * Traits::kPitch];
    // Once all pieces are done with: what each chain has of each head.
    struct {
      float outputs[Traits::kChains][kRowMostHeads][kPartialStride];
      float maxima[Traits::kChains][kRowMostHeads], sums[Traits::kChains][kRowMostHeads];
    } parts;
  };
  alignas(128) unsigned char q[kRowMostHeads * Traits::kPitch];
  // Of a round, by each consumer warp: its tile's weights as the registers of a product, their sums, and the largest
  // scores.
  alignas(16) std::uint32_t weights[kRowChains][32][4];
  float sums[kRowChains][kRowMostHeads], maxima[kRowChains][kRowMostHeads];
  std::uint32_t listed[kRowChains][Traits::kPieces];  // with each piece: which of its tokens exist
  std::int32_t next_unit[Traits::kThreads / 32];      // to look at, of each warp
  std::uint64_t full[kRowChains][Traits::kPieces];    // by each producer lane's copies, and by the warp
  std::uint64_t empty[kRowChains][Traits::kPieces];   // by the warps of the chain
  QsaRowUnit to_merge;                                // the cluster's; row -1: it has none
  // By each warp, behind each row that a CTA has for itself: its parts have been merged, and pieces of the next may
  // take their place. All wait for all: a warp without tiles would else be a phase ahead or two behind.
  std::uint64_t merged;
};

// Of bar.sync; 0 is all threads'. A chain's warps have kChainWarps and the number of their chain in the CTA.
enum QsaRowBarrier : std::uint32_t { kRowConsumers = 1, kChainWarps = 2 };

// What both roles have to know of the row at hand.
struct QsaRow {
  std::int32_t row = 0, sequence = 0, kv_head = 0, length = 0, count = 0;
  bool is_first = false;  // of the CTA's units
};

// The rows of a CTA, one after the other. By all lanes of a warp.
template <typename Traits>
struct QsaRowScan {
  const QsaRowsParams& params;
  std::int32_t* next_unit;  // of each warp, in shared memory: registers are short

  __device__ __forceinline__ static std::int32_t first_unit() {
    return static_cast<std::int32_t>(blockIdx.x / Traits::kCtas);
  }
  __device__ __forceinline__ std::int32_t step() const { return params.num_clusters; }
  // Of the first unit, perhaps not this kernel's.
  __device__ __forceinline__ std::int32_t first_row() const { return first_unit() / params.call.params.num_kv_heads; }

  // The next row of this kernel's; false where there are no more.
  __device__ __forceinline__ bool find(QsaRow& result) {
    const QsaParams& call = params.call.params;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    std::int32_t next = next_unit[threadIdx.x / 32];
#pragma unroll 1
    while (next < params.num_units) {
      // Each lane looks at a unit: there may be many, and most of them none of this kernel's.
      const std::int32_t mine = next + step() * lane;
      std::int32_t sequence = 0, length = 0, count = 0;
      bool takes = false;
      if (mine < params.num_units) {
        const std::int32_t row = mine / call.num_kv_heads;
        count = static_cast<std::int32_t>(call.count(row));
        std::int64_t segment = 1 + row * call.rows.batch / call.rows.total;  // a guess
        RowRange range = call.rows.rows(segment);
        std::int64_t cached = call.rows.batch > 0 ? call.cache_lengths[segment - 1] : 0;
        if (row < range.begin || row >= range.end) {
          segment = call.rows.segment_of_row(row);
          range = call.rows.rows(segment);
          if (call.rows.owned(segment)) cached = call.cache_lengths[segment - 1];
        }
        takes = call.rows.owned(segment) && row >= range.begin && row < range.end && qsa_is_apart(range.size(), true);
        if (takes) {
          sequence = static_cast<std::int32_t>(segment - 1);
          const std::int64_t visible = visible_length(cached, range.size());
          length = static_cast<std::int32_t>(visible < params.longest ? visible : params.longest);
        }
      }
      const std::uint32_t found = __ballot_sync(0xffffffff, takes);
      if (found == 0) {
        next += 32 * step();
        continue;
      }
      const int first = __ffs(static_cast<int>(found)) - 1;
      const std::int32_t unit = next + step() * first;
      result.row = unit / call.num_kv_heads;
      result.kv_head = unit % call.num_kv_heads;
      result.is_first = unit == first_unit();
      result.sequence = __shfl_sync(0xffffffff, sequence, first);
      result.length = __shfl_sync(0xffffffff, length, first);
      result.count = __shfl_sync(0xffffffff, count, first);
      __syncwarp();  // all have read it
      if (lane == 0) next_unit[threadIdx.x / 32] = unit + step();
      __syncwarp();
      return true;
    }
    return false;
  }
};

// A consumer warp's place: its chain, which of the chain's warps it is, and the chain's number in the CTA.
template <typename Traits>
struct QsaRowPlace {
  int warp, chain, place, local;

  __device__ __forceinline__ explicit QsaRowPlace(int warp_) : warp(warp_) {
    local = warp / Traits::kCtas;
    place = warp % Traits::kCtas;
    chain = static_cast<int>(blockIdx.x) % Traits::kCtas * Traits::kChains + local;
  }
};

template <typename Traits>
struct QsaRowProducer {
  static constexpr int kHeadDim = Traits::kHeadDim, kCtas = Traits::kCtas, kPieces = Traits::kPieces;
  static constexpr std::int64_t kNowhere = INT64_MIN;

  const QsaRowsParams& params;
  QsaRowShared<Traits>& shared;
  QsaRowPlace<Traits> to;
  int lane;
  std::uint32_t piece = 0;  // so far

  QsaRow row;

  __device__ __forceinline__ QsaRowProducer(const QsaRowsParams& params_, QsaRowShared<Traits>& shared_)
      : params(params_),
        shared(shared_),
        to(static_cast<int>(threadIdx.x - Traits::kConsumers) / 32),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ const QsaParams& call() const { return params.call.params; }

  // --- Lookups. Lane i has token i % 16 of the warp's tile of round `round` + i / 16.

  __device__ __forceinline__ std::int64_t entry_at(std::int32_t round) const {
    return row_tile_begin(std::int64_t{round + lane / kRowTile} * kCtas + to.place, to.chain) + lane % kRowTile;
  }
  __device__ __forceinline__ std::int32_t read_entry(std::int32_t round, std::int32_t of_row) const {
    const std::int64_t at = entry_at(round);
    if (at >= call().selection_width) return kNoToken;
    return call().token_indices[of_row * call().token_indices_row_stride + at];
  }
  // The token of an entry, where the row lists one there.
  __device__ __forceinline__ std::int32_t token_of(std::int32_t round, std::int32_t entry) const {
    return entry_at(round) < row.count && entry >= 0 && entry < row.length ? entry : kNoToken;
  }
  __device__ __forceinline__ PageLookup pages() const { return {call().cache, params.page_shift}; }

  // --- The gather

  // Tokens [from_lane, from_lane + 16) of `offset`, side by side; zeros where there is none.
  __device__ __forceinline__ void gather(const void* data, std::int64_t offset, int from_lane, std::uint32_t listed) {
    constexpr int kChunks = kHeadDim / 8, kRows = 32 / kChunks;  // of a token, and tokens at once
    const std::uint32_t at = piece % kPieces;
    Barrier::wait(&shared.empty[to.warp][at], (piece / kPieces % 2) ^ 1);
    const char* from = static_cast<const char*>(data) + lane % kChunks * 16;
    const std::uint32_t room =
        shared_address(shared.pieces[to.warp][at]) + lane / kChunks * Traits::kPitch + lane % kChunks * 16;
#pragma unroll 4
    for (int i = 0; i < kRowTile / kRows; ++i) {
      const std::int64_t of_token = __shfl_sync(0xffffffff, offset, from_lane + i * kRows + lane / kChunks);
      const bool exists = of_token != kNowhere;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(room + i * kRows * Traits::kPitch),
                   "l"(exists ? from + of_token : from), "r"(exists ? 16 : 0)
                   : "memory");
    }
    arrive_after_copies(&shared.full[to.warp][at]);
    if (lane == 0) {
      shared.listed[to.warp][at] = listed;
      Barrier::arrive(&shared.full[to.warp][at]);
    }
    ++piece;
  }

  // All of a row; `first` and `second` are entries of its first rounds. `before_the_first` is called when those have
  // been looked up.
  template <typename BeforeTheFirst>
  __device__ __forceinline__ void stream(std::int32_t first, std::int32_t second,
                                         const BeforeTheFirst& before_the_first) {
    const std::int32_t tiles = row_chain(row.count, to.chain);
    std::int32_t token = token_of(0, first), entry = second;
    PageEntry page = pages().read(row.sequence, token);
    before_the_first();
#pragma unroll 1
    for (std::int32_t round = 0; round * kCtas + to.place < tiles; round += 2) {
      const bool exists = pages().exists(page);
      const std::int64_t offset = exists ? pages().offset(token, page, row.kv_head) : kNowhere;
      const std::uint32_t listed = __ballot_sync(0xffffffff, exists);
      token = token_of(round + 2, entry);
      page = pages().read(row.sequence, token);
      entry = read_entry(round + 4, row.row);
#pragma unroll 1
      for (int i = 0; i < 2 && (round + i) * kCtas + to.place < tiles; ++i) {
        gather(call().cache.k, offset, i * kRowTile, listed >> (i * kRowTile));
        gather(call().cache.v, offset, i * kRowTile, 0);
      }
    }
  }
};

template <typename Traits>
struct QsaRowConsumer {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim, kCtas = Traits::kCtas, kColumns = Traits::kColumns;
  static constexpr int kPieces = Traits::kPieces, kPitch = Traits::kPitch;

  const QsaRowsParams& params;
  QsaRowShared<Traits>& shared;
  QsaRowPlace<Traits> at;
  int lane;
  std::uint32_t used = 0;  // pieces, before this row

  QsaRow row;
  std::int32_t tiles, rounds;
  float maximum[2], sum[2];  // of the scaled scores, in units of log2
  float output[kColumns / 8][4];
  std::uint32_t q[Traits::kKeepsQ ? kHeadDim / 16 : 1][4];

  __device__ __forceinline__ QsaRowConsumer(const QsaRowsParams& params_, QsaRowShared<Traits>& shared_)
      : params(params_),
        shared(shared_),
        at(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ const QsaParams& call() const { return params.call.params; }

  __device__ __forceinline__ static void consumers_sync() {
    cutlass::arch::NamedBarrier::sync(Traits::kConsumers, kRowConsumers);
  }
  __device__ __forceinline__ void chain_sync() const {
    if constexpr (kCtas == 1) {
      __syncwarp();
    } else {
      cutlass::arch::NamedBarrier::sync(32 * kCtas, kChainWarps + static_cast<std::uint32_t>(at.local));
    }
  }

  // Pieces 2 r and 2 r + 1 of a warp are K and V of its tile of round r. Where one lies, once it is there.
  __device__ __forceinline__ std::uint32_t wait_for(std::uint32_t piece, int of_warp) const {
    piece += used;
    Barrier::wait(&shared.full[of_warp][piece % kPieces], piece / kPieces % 2);
    return shared_address(shared.pieces[of_warp][piece % kPieces]);
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
  __device__ __forceinline__ static void load_two_transposed(std::uint32_t address, std::uint32_t& low,
                                                             std::uint32_t& high) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(low), "=r"(high)
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

  __device__ __forceinline__ std::uint32_t q_address() const {
    return shared_address(shared.q) + static_cast<std::uint32_t>(lane % 16 * kPitch + lane / 16 * 16);
  }
  __device__ __forceinline__ void keep_q() {
    if constexpr (Traits::kKeepsQ) {
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) load_four(q_address() + step * 32, q[step]);
    }
  }

  // Of the warp's tile: two blocks of eight tokens. Scaled; -inf where there is no token.
  __device__ __forceinline__ void scores_of(std::uint32_t k, std::uint32_t listed, float (&scores)[8]) const {
    const std::uint32_t mine = listed >> (lane % 4 * 2);
    k += static_cast<std::uint32_t>((lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16);
    float parts[2][8];  // two chains of products instead of one
#pragma unroll
    for (int i = 0; i < 8; ++i) parts[0][i] = parts[1][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      std::uint32_t b[4];
      load_four(k + step * 32, b);
      if constexpr (Traits::kKeepsQ) {
        multiply(&parts[step % 2][0], q[step], b[0], b[1]);
        multiply(&parts[step % 2][4], q[step], b[2], b[3]);
      } else {
        std::uint32_t a[4];
        load_four(q_address() + step * 32, a);
        multiply(&parts[step % 2][0], a, b[0], b[1]);
        multiply(&parts[step % 2][4], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool is_listed = (mine >> (i / 4 * 8 + i % 2) & 1) != 0;
      scores[i] = is_listed ? (parts[0][i] + parts[1][i]) * params.scale_log2 : -INFINITY;
    }
  }

  __device__ __forceinline__ void add_values(std::uint32_t v, const std::uint32_t (&weights)[4]) {
    v += static_cast<std::uint32_t>(lane % 16 * kPitch + at.place * kColumns * 2 + lane / 16 * 16);
    if constexpr (kColumns == 8) {
      std::uint32_t b[2];
      load_two_transposed(v - static_cast<std::uint32_t>(lane / 16 * 16), b[0], b[1]);
      multiply(output[0], weights, b[0], b[1]);
    } else {
#pragma unroll
      for (int block = 0; block < kColumns / 8; block += 2) {
        std::uint32_t b[4];
        load_four_transposed(v + block * 16, b);
        multiply(output[block], weights, b[0], b[1]);
        multiply(output[block + 1], weights, b[2], b[3]);
      }
    }
  }

  // --- A row

  __device__ __forceinline__ void begin() {
    tiles = row_chain(row.count, at.chain);
    rounds = (tiles + kCtas - 1) / kCtas;
    constexpr int kChunks = kHeadDim / 8;
    const int heads = call().group();
    for (int i = static_cast<int>(threadIdx.x); i < kRowMostHeads * kChunks; i += Traits::kConsumers) {
      const int head = i / kChunks, chunk = i % kChunks;
      const auto* from = static_cast<const Element*>(call().q) + row.row * call().q_row_stride +
                         (row.kv_head * heads + (head < heads ? head : 0)) * call().q_head_stride + chunk * 8;
      asm volatile(
          "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared.q) + head * kPitch + chunk * 16),
          "l"(from), "r"(head < heads ? 16 : 0)
          : "memory");
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = -INFINITY;
      sum[r] = 0.0f;
    }
#pragma unroll
    for (auto& block : output) block[0] = block[1] = block[2] = block[3] = 0.0f;
    asm volatile("cp.async.wait_all;" ::: "memory");
    consumers_sync();
    keep_q();
  }

  __device__ __forceinline__ void step(std::int32_t round) {
    const auto piece = 2 * static_cast<std::uint32_t>(round);
    float scores[8];
    if (round * kCtas + at.place < tiles) {
      const std::uint32_t k = wait_for(piece, at.warp);
      const std::uint32_t stage = (used + piece) % kPieces;
      scores_of(k, shared.listed[at.warp][stage], scores);
      __syncwarp();
      if (lane < kCtas) Barrier::arrive(&shared.empty[at.warp][stage]);
    } else {
#pragma unroll
      for (float& score : scores) score = -INFINITY;
    }

    // The largest score of each of the round's tiles, then of all so far.
    float tile_maximum[kCtas][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tile_maximum[0][r] =
          quad_max(fmaxf(fmaxf(scores[2 * r], scores[2 * r + 1]), fmaxf(scores[4 + 2 * r], scores[5 + 2 * r])));
    }
    if constexpr (kCtas > 1) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (lane % 4 == 0) shared.maxima[at.warp][lane / 4 + 8 * r] = tile_maximum[0][r];
      }
      chain_sync();
#pragma unroll
      for (int i = 0; i < kCtas; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) tile_maximum[i][r] = shared.maxima[at.warp - at.place + i][lane / 4 + 8 * r];
      }
    }
    float factor[kCtas][2], offset[2] = {0.0f, 0.0f};  // of the warp's own tile
#pragma unroll
    for (int i = 0; i < kCtas; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float largest = fmaxf(maximum[r], tile_maximum[i][r]);
        const float finite = largest == -INFINITY ? 0.0f : largest;  // -inf - -inf would be NaN
        factor[i][r] = exp2_approximate(maximum[r] - finite);
        maximum[r] = largest;
        if (i == at.place) offset[r] = finite;
      }
    }

    // The weights of each tile, relative to the largest score up to it.
    float tile_sum[kCtas][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[i / 2 * 4 + 2 * r + i % 2];
        score = exp2_approximate(score - offset[r]);
      }
      tile_sum[0][r] = quad_sum((scores[2 * r] + scores[2 * r + 1]) + (scores[4 + 2 * r] + scores[5 + 2 * r]));
    }
    std::uint32_t weights[kCtas][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[0][i] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
    if constexpr (kCtas > 1) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (lane % 4 == 0) shared.sums[at.warp][lane / 4 + 8 * r] = tile_sum[0][r];
      }
      *reinterpret_cast<uint4*>(shared.weights[at.warp][lane]) =
          make_uint4(weights[0][0], weights[0][1], weights[0][2], weights[0][3]);
      chain_sync();
#pragma unroll
      for (int i = 0; i < kCtas; ++i) {
        const uint4 four = *reinterpret_cast<const uint4*>(shared.weights[at.warp - at.place + i][lane]);
        weights[i][0] = four.x, weights[i][1] = four.y, weights[i][2] = four.z, weights[i][3] = four.w;
#pragma unroll
        for (int r = 0; r < 2; ++r) tile_sum[i][r] = shared.sums[at.warp - at.place + i][lane / 4 + 8 * r];
      }
    }

#pragma unroll
    for (int i = 0; i < kCtas; ++i) {
      if (round * kCtas + i >= tiles) break;
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] = __fmaf_rn(sum[r], factor[i][r], tile_sum[i][r]);
      // A maximum that stays, as most do, gives a factor of exactly 1.
      if (__any_sync(0xffffffff, factor[i][0] != 1.0f || factor[i][1] != 1.0f)) {
#pragma unroll
        for (auto& block : output) {
#pragma unroll
          for (int j = 0; j < 4; ++j) block[j] *= factor[i][j / 2];
        }
      }
      const int owner = at.warp - at.place + i;
      add_values(wait_for(piece + 1, owner), weights[i]);
      __syncwarp();
      if (lane == 0) Barrier::arrive(&shared.empty[owner][(used + piece + 1) % kPieces]);
    }
    if constexpr (kCtas > 1) chain_sync();  // all have read what was exchanged
  }

  // What the chains have, in the place of the pieces.
  __device__ __forceinline__ void store_parts() {
    used += 2 * static_cast<std::uint32_t>(rounds);
    consumers_sync();  // nobody needs the pieces any more
    const int heads = call().group();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = lane / 4 + 8 * r;
      if (head >= heads) continue;
      if (at.place == 0 && lane % 4 == 0) {
        shared.parts.maxima[at.local][head] = maximum[r];
        shared.parts.sums[at.local][head] = sum[r];
      }
      float* to = shared.parts.outputs[at.local][head] + at.place * kColumns + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        *reinterpret_cast<float2*>(to + 8 * i) = make_float2(output[i][2 * r], output[i][2 * r + 1]);
      }
    }
  }
};

// The chains of a row, in their order, by the consumers of all its CTAs; each CTA a part of the columns.
template <typename Traits>
__device__ __forceinline__ void merge_row(const QsaRowsParams& params, QsaRowShared<Traits>& shared, QsaRowUnit unit) {
  const auto of_cta = [&](auto* mine, int cta) {
    if constexpr (Traits::kCtas == 1) {
      return mine;
    } else {
      return cooperative_groups::this_cluster().map_shared_rank(mine, cta);
    }
  };
  const int heads = params.call.params.group(), rank = static_cast<int>(blockIdx.x) % Traits::kCtas;
  constexpr int kFours = Traits::kColumns / 4;
  for (int i = static_cast<int>(threadIdx.x); i < heads * kFours; i += Traits::kConsumers) {
    const int head = i / kFours, column = rank * Traits::kColumns + i % kFours * 4;
    RowParts<kRowChains> parts;
#pragma unroll
    for (int c = 0; c < kRowChains; ++c) {
      constexpr int kChains = Traits::kChains;
      parts.maxima[c] = *of_cta(&shared.parts.maxima[c % kChains][head], c / kChains);
      parts.sums[c] = *of_cta(&shared.parts.sums[c % kChains][head], c / kChains);
      parts.outputs[c] =
          *reinterpret_cast<const float4*>(of_cta(&shared.parts.outputs[c % kChains][head][column], c / kChains));
    }
    parts.store(params.call, unit.row, unit.kv_head * heads + head, column);
  }
}

// Rows before the first sequence and after the last get 0 and -inf.
template <typename Traits>
__device__ __forceinline__ void store_rows_of_none(const QsaRowsParams& params) {
  const QsaParams& call = params.call.params;
  const std::int64_t first_end = call.rows.boundary(1);
  const std::int64_t last_begin = max(first_end, call.rows.boundary(call.rows.batch + 1));
  const std::int64_t rows = first_end + (call.rows.total - last_begin);
  constexpr int kFours = Traits::kHeadDim / 4;
  for (std::int64_t i = blockIdx.x; i < rows; i += params.num_clusters * Traits::kCtas) {
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
  constexpr int kCtas = Traits::kCtas;
  if (threadIdx.x < kRowChains * Traits::kPieces) {
    Barrier::init(&shared.full[0][threadIdx.x], 32 + 1);
    Barrier::init(&shared.empty[0][threadIdx.x], kCtas);
    if (threadIdx.x == 0) {
      Barrier::init(&shared.merged, Traits::kThreads / 32);
      shared.to_merge = {-1, 0};
    }
    cutlass::arch::fence_barrier_init();
  }
  if (threadIdx.x % 32 == 0) shared.next_unit[threadIdx.x / 32] = QsaRowScan<Traits>::first_unit();
  cudaTriggerProgrammaticLaunchCompletion();
  bool takes = !params.sparse;
  if (params.sparse) {
    const RaggedRows& rows = params.call.params.rows;
    for (std::int64_t segment = threadIdx.x; segment < rows.num_segments() && !takes; segment += Traits::kThreads) {
      const std::int64_t size = rows.rows(segment).size();
      takes = size > 0 && qsa_is_apart(size, rows.owned(segment));
    }
  }
  if (!__syncthreads_or(takes)) {
    cudaGridDependencySynchronize();
    return;
  }
  QsaRowScan<Traits> scan{params, shared.next_unit};
  const bool consumes = threadIdx.x < Traits::kConsumers;
  if (!consumes) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    QsaRowProducer<Traits> producer(params, shared);
    std::int32_t entry = producer.read_entry(0, scan.first_row()),
                 next_entry = producer.read_entry(2, scan.first_row());
    std::uint32_t rows = 0;  // before this one
#pragma unroll 1
    while (scan.find(producer.row)) {
      if (!producer.row.is_first) {
        entry = producer.read_entry(0, producer.row.row);
        next_entry = producer.read_entry(2, producer.row.row);
      }
      producer.stream(entry, next_entry, [&] {
        if (kCtas == 1 && rows > 0) warps_meet(&shared.merged, (rows - 1) % 2, static_cast<int>(threadIdx.x));
      });
      ++rows;
      if constexpr (kCtas > 1) break;  // a cluster has one unit at most
    }
    if (kCtas == 1 && rows > 0) warps_meet(&shared.merged, (rows - 1) % 2, static_cast<int>(threadIdx.x));
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    QsaRowConsumer<Traits> consumer(params, shared);
    std::uint32_t rows = 0;
#pragma unroll 1
    while (scan.find(consumer.row)) {
      consumer.begin();
#pragma unroll 1
      for (std::int32_t round = 0; round < consumer.rounds; ++round) consumer.step(round);
      consumer.store_parts();
      if constexpr (kCtas > 1) {
        if (threadIdx.x == 0) shared.to_merge = {consumer.row.row, consumer.row.kv_head};
        break;
      }
      QsaRowConsumer<Traits>::consumers_sync();
      merge_row<Traits>(params, shared, {consumer.row.row, consumer.row.kv_head});
      warps_meet(&shared.merged, rows++ % 2, static_cast<int>(threadIdx.x));
    }
  }
  // Both roles, at one place of the code.
  if constexpr (kCtas > 1) {
    cute::cluster_arrive();
    cute::cluster_wait();
    if (consumes && shared.to_merge.row >= 0) merge_row<Traits>(params, shared, shared.to_merge);
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();  // before a CTA leaves whose parts are being read
  }
  store_rows_of_none<Traits>(params);
  // The kernel before this one may still be at work; whatever comes next on the stream waits for this one alone.
  cudaGridDependencySynchronize();
}

// Clusters of kCtas CTAs that a device holds at once.
template <typename Traits>
int clusters_at_once(int device) {
  static std::atomic<int> known[64] = {};  // plus one
  if (device < 64 && known[device].load(std::memory_order_relaxed) > 0) return known[device] - 1;
  allow_shared_memory<qsa_rows_kernel<Traits>>(sizeof(QsaRowShared<Traits>), device);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(Traits::kCtas);
  config.blockDim = dim3(Traits::kThreads);
  config.dynamicSmemBytes = sizeof(QsaRowShared<Traits>);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = Traits::kCtas;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&clusters, qsa_rows_kernel<Traits>, &config), "counting clusters");
  if (device < 64) known[device].store(clusters + 1, std::memory_order_relaxed);
  return clusters;
}

template <typename Traits>
void launch_qsa_rows_as(QsaRowsParams params, bool beside, int device, StreamHandle stream) {
  static_assert(sizeof(QsaRowShared<Traits>) <= 227 * 1024);
  params.num_clusters =
      Traits::kCtas > 1
          ? params.num_units
          : std::min(params.num_units, (params.sparse ? 1 : 4) * cuda_device_info(device).num_multiprocessors);
  launch<qsa_rows_kernel<Traits>>(params, params.num_clusters * Traits::kCtas, Traits::kThreads,
                                  sizeof(QsaRowShared<Traits>), device, static_cast<cudaStream_t>(stream),
                                  "launching qsa_sparse_attention", beside, Traits::kCtas);
}

template <typename Element, int kHeadDim>
void launch_qsa_rows(const portable::QsaKernelParams& call, bool beside, bool sparse, int device, StreamHandle stream) {
  const QsaParams& params = call.params;
  QsaRowsParams kernel_params;
  kernel_params.call = call;
  kernel_params.scale_log2 = params.scale * kLog2E;
  kernel_params.page_shift = page_shift(params.cache);
  kernel_params.longest = longest_context(params.cache);
  kernel_params.num_units = static_cast<std::int32_t>(params.rows.total * params.num_kv_heads);
  kernel_params.sparse = sparse;
  if (sparse) {  // a CTA looks through many rows
    return launch_qsa_rows_as<QsaRowTraits<Element, kHeadDim, 1>>(kernel_params, beside, device, stream);
  }
  const int room[] = {clusters_at_once<QsaRowTraits<Element, kHeadDim, 2>>(device),
                      clusters_at_once<QsaRowTraits<Element, kHeadDim, 4>>(device),
                      clusters_at_once<QsaRowTraits<Element, kHeadDim, 8>>(device)};
  switch (row_ctas(kernel_params.num_units, room)) {
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
