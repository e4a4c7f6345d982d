// Attention over selected tokens, row by row: for sequences of few rows (decode, multi-token prediction), and of the
// longest contexts; for bfloat16 and float16 on Hopper.
//
// A unit of work is a row and one kv head, with up to 16 query heads. row_plan.h says how its list is dealt out to the
// workers of a CTA, or of a cluster, in chains of tiles of 64 tokens. Tokens are the rows of both products, heads their
// columns: S^T = K Q^T, O^T += V^T P^T. So K and V come from shared memory once, and O takes few registers.
//   Producer warps, eight, shared out to the workers: look up the tokens of a worker's tiles, of several tiles at once,
//   a token a lane, and gather K and V of a tile by cp.async as soon as there is room: pieces, in a ring.
//   A worker is a warpgroup. For each tile: S^T, scaled; weights, relative to a maximum that is brought up to date only
//   where a score is far beyond it; they go to shared memory, with a vote on that; O^T.
// At the end the chains are merged two by two, a worker's in registers, the rest across the cluster through distributed
// shared memory.
//
// Rows of a sequence follow each other, so that what they share is read from DRAM once, and from L2 after that. Reads
// that wait for each other are what a short batch takes its time for, so a row's sequence is guessed: all have as many
// rows.
#pragma once

#include <cooperative_groups.h>

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
  float sequences_per_row = 0.0f;  // for likely_sequence()
  QsaApart apart;                  // what this kernel takes
  bool sparse = false;             // probably nothing
};

template <typename Element_, int kHeadDim_, int kCtas_>
struct QsaRowTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kCtas = kCtas_;
  static constexpr int kWorkers = row_workers(kCtas);              // of a CTA
  static constexpr int kChains = kRowChains / (kCtas * kWorkers);  // of a worker
  static constexpr int kLeaves = kCtas * kWorkers;                 // parts of a row that workers have
  static constexpr int kBlocks = kHeadDim / kBlockColumns;
  static constexpr int kColumns = kHeadDim / kCtas;                // of a row, that a CTA merges
  static constexpr int kFeeders = 8 / kWorkers;                    // producer warps of a worker
  static constexpr int kTokens = kRowTile / kFeeders;              // of a tile, that are a producer warp's
  static constexpr int kBatch = 32 / kTokens;                      // tiles
  static constexpr int kPieces = kRowPieces<kHeadDim> / kWorkers;  // of a worker
  static constexpr int kPieceBytes = kRowTile * 2 * kHeadDim;
  static constexpr int kConsumers = 128 * kWorkers, kThreads = kConsumers + 256;
  // No more than the launch allocates: 128 for every thread, 168 where there are 384.
  static constexpr int kConsumerRegisters = 184, kProducerRegisters = 72;
};

template <typename Traits>
struct QsaRowShared {
  using Element = typename Traits::Element;
  static constexpr int kWorkers = Traits::kWorkers;
  static constexpr int kPartialPad = 4;  // from head to head; spreads the heads of a quad over the banks
  // What each worker has of each head.
  template <int kStride>
  struct Parts {
    float outputs[kWorkers][kRowMostHeads][kStride];
    float maxima[kWorkers][kRowMostHeads], sums[kWorkers][kRowMostHeads];
  };
  union {
    // K or V of a tile: blocks of 64 columns, each row 128 bytes with its 16-byte chunks swizzled.
    alignas(1024) unsigned char pieces[kWorkers][Traits::kPieces][Traits::kPieceBytes];
    // Of a cluster, once all pieces are done with.
    Parts<Traits::kHeadDim + kPartialPad> parts;
  };
  // Of a CTA alone, a block of 64 columns at a time: the next row's pieces are on their way meanwhile.
  Parts<kBlockColumns + kPartialPad> block_parts;
  alignas(1024) Element q[Traits::kBlocks][kRowMostHeads][kBlockColumns];
  // Of two tiles in turn, swizzled as well: while the warps of a worker are at one, some may still read the other.
  alignas(1024) Element weights[kWorkers][2][kRowMostHeads][kRowTile];
  float exchange[kWorkers][4][kRowMostHeads];  // of the warps of a worker: maxima of a tile, sums of a chain
  alignas(2) unsigned char listed[kWorkers][Traits::kPieces][kRowTile / 8];  // with each piece: which tokens exist
  std::int32_t next_unit[Traits::kThreads / 32];                             // to look at, of each warp
  std::uint64_t full[kWorkers][Traits::kPieces];   // by each producer lane's copies, and by the warp
  std::uint64_t empty[kWorkers][Traits::kPieces];  // by the worker's warps
  std::uint64_t met;                               // by the consumer warps of a CTA alone, to merge a block
};

// Of bar.sync; 0 is all threads'. A worker's is kWorkerWarps and its number.
enum QsaRowBarrier : std::uint32_t { kRowConsumers = 1, kWorkerWarps = 2 };

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
        std::int64_t segment = 1 + likely_sequence(row, call.rows.batch, params.sequences_per_row);
        RowRange range = call.rows.rows(segment);
        std::int64_t cached = call.rows.batch > 0 ? call.cache_lengths[segment - 1] : 0;
        if (row < range.begin || row >= range.end) {
          segment = call.rows.segment_of_row(row);
          range = call.rows.rows(segment);
          if (call.rows.owned(segment)) cached = call.cache_lengths[segment - 1];
        }
        const std::int64_t visible = visible_length(cached, range.size());
        takes = call.rows.owned(segment) && row >= range.begin && row < range.end &&
                (params.apart.by_rows(range.size(), true) || params.apart.by_length(visible));
        if (takes) {
          sequence = static_cast<std::int32_t>(segment - 1);
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

// The tiles of a worker of this CTA: those of a run of chains.
template <typename Traits>
struct QsaRowShare {
  std::int32_t count;  // of the list
  int first_chain;

  __device__ __forceinline__ QsaRowShare(std::int32_t count_, int worker)
      : count(count_),
        first_chain((static_cast<int>(blockIdx.x) % Traits::kCtas * Traits::kWorkers + worker) * Traits::kChains) {}

  __device__ __forceinline__ std::int32_t begin(int chain = 0) const {
    return row_chain_begin(count, first_chain + chain);
  }
  __device__ __forceinline__ std::int32_t end(int chain = Traits::kChains - 1) const { return begin(chain + 1); }
};

template <typename Traits>
struct QsaRowProducer {
  static constexpr int kHeadDim = Traits::kHeadDim, kPieces = Traits::kPieces;
  static constexpr int kTokens = Traits::kTokens, kBatch = Traits::kBatch;

  const QsaRowsParams& params;
  QsaRowShared<Traits>& shared;
  int worker, place, lane;  // place: which of the worker's producer warps this is
  std::uint32_t piece = 0;  // so far

  QsaRow row;

  __device__ __forceinline__ QsaRowProducer(const QsaRowsParams& params_, QsaRowShared<Traits>& shared_)
      : params(params_), shared(shared_), lane(static_cast<int>(threadIdx.x) % 32) {
    const int warp = static_cast<int>(threadIdx.x - Traits::kConsumers) / 32;
    worker = warp / Traits::kFeeders;
    place = warp % Traits::kFeeders;
  }

  __device__ __forceinline__ const QsaParams& call() const { return params.call.params; }

  // --- Lookups. Lane i has token i % kTokens of the warp's part of tile `tile` + i / kTokens.

  __device__ __forceinline__ std::int64_t entry_at(std::int32_t tile) const {
    return (std::int64_t{tile} + lane / kTokens) * kRowTile + place * kTokens + lane % kTokens;
  }
  __device__ __forceinline__ std::int32_t read_entry(std::int32_t tile, std::int32_t of_row) const {
    const std::int64_t at = entry_at(tile);
    if (at >= call().selection_width) return kNoToken;
    return call().token_indices[of_row * call().token_indices_row_stride + at];
  }
  // The token of an entry, where the row lists one there.
  __device__ __forceinline__ std::int32_t token_of(std::int32_t tile, std::int32_t entry) const {
    return entry_at(tile) < row.count && entry >= 0 && entry < row.length ? entry : kNoToken;
  }
  __device__ __forceinline__ PageLookup pages() const { return {call().cache, params.page_shift}; }

  // --- The gather

  // Tokens [from_lane, from_lane + kTokens) of `offset`; zeros where there is none.
  __device__ __forceinline__ void gather(const void* data, std::int64_t offset, int from_lane, std::uint32_t listed) {
    const std::uint32_t at = piece % kPieces;
    Barrier::wait(&shared.empty[worker][at], (piece / kPieces % 2) ^ 1);
    copy_tokens<kRowTile, kTokens, Traits::kBlocks>(data, offset, from_lane, shared_address(shared.pieces[worker][at]),
                                                    place * kTokens, lane);
    arrive_after_copies(&shared.full[worker][at]);
    if (lane == 0) {
      using Bits = std::conditional_t<kTokens == 16, std::uint16_t, std::uint8_t>;
      reinterpret_cast<Bits*>(shared.listed[worker][at])[place] = static_cast<Bits>(listed);
      Barrier::arrive(&shared.full[worker][at]);
    }
    ++piece;
  }

  // What a batch of tiles and the next one list, from `tile` on.
  struct Entries {
    std::int32_t tile, first, second;
  };
  __device__ __forceinline__ Entries read_entries(std::int32_t tile, std::int32_t of_row) const {
    return {tile, read_entry(tile, of_row), read_entry(tile + kBatch, of_row)};
  }
  // Where a row's list is full.
  __device__ __forceinline__ Entries guess_entries(std::int32_t of_row) const {
    const auto width = static_cast<std::int32_t>(min(call().selection_width, std::int64_t{0x7fffffff}));
    return read_entries(QsaRowShare<Traits>(width, worker).begin(), of_row);
  }

  // All that the worker has of a row.
  __device__ __forceinline__ void stream(Entries entries) {
    const QsaRowShare<Traits> share(row.count, worker);
    const std::int32_t begin = share.begin(), end = share.end();
    if (!row.is_first || entries.tile != begin) entries = read_entries(begin, row.row);
    std::int32_t token = token_of(begin, entries.first), entry = entries.second;
    PageEntry page = pages().read(row.sequence, token);
#pragma unroll 1
    for (std::int32_t tile = begin; tile < end; tile += kBatch) {
      const bool exists = pages().exists(page);
      const std::int64_t offset = exists ? pages().offset(token, page, row.kv_head) : kNowhere;
      const std::uint32_t listed = __ballot_sync(0xffffffff, exists);
      token = token_of(tile + kBatch, entry);
      page = pages().read(row.sequence, token);
      entry = read_entry(tile + 2 * kBatch, row.row);
#pragma unroll 1
      for (int i = 0; i < kBatch && tile + i < end; ++i) {
        gather(call().cache.k, offset, i * kTokens, listed >> (i * kTokens));
        gather(call().cache.v, offset, i * kTokens, 0);
      }
    }
  }
};

// A worker. Thread t, warp w = t / 32, lane l has of S^T and O^T, in a register 4 j + 2 r + e of a product, the token
// or column 16 w + l / 4 + 8 r and the head 8 j + 2 (l % 4) + e: four heads, h = 2 j + e.
template <typename Traits>
struct QsaRowConsumer {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim, kBlocks = Traits::kBlocks, kPieces = Traits::kPieces;
  // A maximum is brought up to date where a score is so far beyond it, in units of log2: weights stay under 2^8, which
  // both types and their sums hold as well as those under 1.
  static constexpr float kFar = 8.0f;

  // What there is of a chain, or of several that have been merged.
  struct Part {
    float maximum[4], sum[4];  // relative to which terms are, in units of log2; the whole sum, once a chain is done
    float output[kBlocks][8];
  };

  const QsaRowsParams& params;
  QsaRowShared<Traits>& shared;
  int worker, warp, lane;
  std::uint32_t tiles = 0, meetings = 0;  // so far

  QsaRow row;

  __device__ __forceinline__ QsaRowConsumer(const QsaRowsParams& params_, QsaRowShared<Traits>& shared_)
      : params(params_),
        shared(shared_),
        worker(static_cast<int>(threadIdx.x) / 128),
        warp(static_cast<int>(threadIdx.x) / 32 % 4),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ const QsaParams& call() const { return params.call.params; }
  __device__ __forceinline__ int head(int h) const { return h / 2 * 8 + lane % 4 * 2 + h % 2; }

  __device__ __forceinline__ static void consumers_sync() {
    cutlass::arch::NamedBarrier::sync(Traits::kConsumers, kRowConsumers);
  }
  __device__ __forceinline__ std::uint32_t barrier() const { return kWorkerWarps + static_cast<std::uint32_t>(worker); }
  __device__ __forceinline__ void worker_sync() const { cutlass::arch::NamedBarrier::sync(128, barrier()); }
  // The worker's warps meet; whether it holds for any of their threads.
  __device__ __forceinline__ bool worker_any(bool holds) const {
    std::uint32_t any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "bar.red.or.pred q, %2, 128, p;\n"
        "selp.u32 %0, 1, 0, q;\n"
        "}"
        : "=r"(any)
        : "r"(static_cast<std::uint32_t>(holds)), "r"(barrier())
        : "memory");
    return any != 0;
  }

  __device__ __forceinline__ void load_q() {
    constexpr int kChunks = kHeadDim / 8;
    const int heads = call().group();
    for (int i = static_cast<int>(threadIdx.x); i < kRowMostHeads * kChunks; i += Traits::kConsumers) {
      const int of_head = i / kChunks, chunk = i % kChunks;
      const auto* from = static_cast<const Element*>(call().q) + row.row * call().q_row_stride +
                         (row.kv_head * heads + (of_head < heads ? of_head : 0)) * call().q_head_stride + chunk * 8;
      copy_16(shared_address(shared.q) + chunk_offset<kRowMostHeads>(of_head, chunk), from, of_head < heads);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    cutlass::arch::fence_view_async_shared();
    consumers_sync();
  }

  // Everything that the worker has of the row: of a CTA alone to the result, else in the place of the pieces.
  __device__ __forceinline__ void run() {
    const QsaRowShare<Traits> share(row.count, worker);
    load_q();
    Part part, pair, half;  // the chain at hand, then what it is merged with; chains, pairs
#pragma unroll 1
    for (int chain = 0; chain < Traits::kChains; ++chain) {
      run_chain(share.end(chain) - share.begin(chain), part);
      if constexpr (Traits::kChains > 1) {
        if (chain % 2 == 0) {
          pair = part;
        } else {
          merge_into(part, pair);
          if constexpr (Traits::kChains == 4) {
            if (chain == 1) {
              half = part;
            } else {
              merge_into(part, half);
            }
          }
        }
      }
    }
    if constexpr (Traits::kCtas == 1) {
      merge_alone(part);
    } else {
      consumers_sync();  // nobody needs the pieces any more
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) store(part, block, shared.parts, block * kBlockColumns);
    }
  }

 private:
  // `part` comes after `before`.
  __device__ __forceinline__ static void merge_into(Part& part, const Part& before) {
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const MergeWeights merged(before.maximum[h], part.maximum[h]);
      part.maximum[h] = merged.maximum;
      part.sum[h] = merged(before.sum[h], part.sum[h]);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int i = h / 2 * 4 + 2 * r + h % 2;
          part.output[block][i] = merged(before.output[block][i], part.output[block][i]);
        }
      }
    }
  }

  __device__ __forceinline__ void run_chain(std::int32_t num_tiles, Part& part) {
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      part.maximum[h] = -INFINITY;
      part.sum[h] = 0.0f;
    }
#pragma unroll
    for (auto& block : part.output) {
#pragma unroll
      for (float& value : block) value = 0.0f;
    }
#pragma unroll 1
    for (std::int32_t tile = 0; tile < num_tiles; ++tile) step(part);
    if (num_tiles > 0) add_up(part);
  }

  // Over the tokens that the worker's threads have.
  __device__ __forceinline__ void add_up(Part& part) {
#pragma unroll
    for (int h = 0; h < 4; ++h) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) part.sum[h] += __shfl_xor_sync(0xffffffff, part.sum[h], step);
      if (lane < 4) shared.exchange[worker][warp][head(h)] = part.sum[h];
    }
    worker_sync();
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const float (*const of_warps)[kRowMostHeads] = shared.exchange[worker];
      part.sum[h] = (of_warps[0][head(h)] + of_warps[1][head(h)]) + (of_warps[2][head(h)] + of_warps[3][head(h)]);
    }
  }

  // Brings the maxima up to date with a tile's scores.
  __device__ __forceinline__ void raise(const float (&scores)[8], Part& part) {
    float largest[4];
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      largest[h] = fmaxf(scores[h / 2 * 4 + h % 2], scores[h / 2 * 4 + h % 2 + 2]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffff, largest[h], step));
      }
      if (lane < 4) shared.exchange[worker][warp][head(h)] = largest[h];
    }
    worker_sync();
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      float maximum = part.maximum[h];
#pragma unroll
      for (int of_warp = 0; of_warp < 4; ++of_warp) {
        maximum = fmaxf(maximum, shared.exchange[worker][of_warp][head(h)]);
      }
      const float factor = exp2_approximate(part.maximum[h] - finite(maximum));
      part.maximum[h] = maximum;
      part.sum[h] *= factor;
#pragma unroll
      for (auto& block : part.output) {
#pragma unroll
        for (int r = 0; r < 2; ++r) block[h / 2 * 4 + 2 * r + h % 2] *= factor;
      }
    }
  }
  // -inf - -inf would be NaN.
  __device__ __forceinline__ static float finite(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

  // Relative to the part's maximum, to shared memory for the product.
  __device__ __forceinline__ void weigh(const float (&scores)[8], const Part& part, float (&weights)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) weights[i] = exp2_approximate(scores[i] - finite(part.maximum[i / 4 * 2 + i % 2]));
    const int row_of_eight = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
            shared_address(shared.weights[worker][tiles % 2]) + chunk_offset<kRowMostHeads>(row_of_eight, chunk)),
        "r"(pack<Element>(weights[0], weights[1])), "r"(pack<Element>(weights[2], weights[3])),
        "r"(pack<Element>(weights[4], weights[5])), "r"(pack<Element>(weights[6], weights[7]))
        : "memory");
    cutlass::arch::fence_view_async_shared();
  }

  // K of the worker's tile `tiles` is piece 2 `tiles`, V the next. Where it lies, once it is there.
  __device__ __forceinline__ std::uint32_t wait_for(std::uint32_t piece) const {
    Barrier::wait(&shared.full[worker][piece % kPieces], piece / kPieces % 2);
    cutlass::arch::fence_view_async_shared();
    return shared_address(shared.pieces[worker][piece % kPieces]);
  }
  __device__ __forceinline__ void release(std::uint32_t piece) {
    __syncwarp();
    if (lane == 0) Barrier::arrive(&shared.empty[worker][piece % kPieces]);
  }

  __device__ __forceinline__ void step(Part& part) {
    float scores[8], weights[8];
    scores_of(2 * tiles, scores);
    weigh(scores, part, weights);
    bool far = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) far |= scores[i] > part.maximum[i / 4 * 2 + i % 2] + kFar;
    if (worker_any(far)) {  // and all have written theirs
      raise(scores, part);
      weigh(scores, part, weights);
      worker_sync();
    }
#pragma unroll
    for (int h = 0; h < 4; ++h) part.sum[h] += weights[h / 2 * 4 + h % 2] + weights[h / 2 * 4 + h % 2 + 2];
    add_values(2 * tiles + 1, part);
    ++tiles;
  }

  // Scaled; -inf where there is no token.
  __device__ __forceinline__ void scores_of(std::uint32_t piece, float (&scores)[8]) {
    const std::uint64_t k = descriptor_k_major(wait_for(piece)), q = descriptor_k_major(shared_address(shared.q));
    const unsigned char* const listed = &shared.listed[worker][piece % kPieces][2 * warp];
    pin(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const std::uint64_t in_block = descriptor_step(step % 4 * 32);
      wgmma_shared<Element, kRowMostHeads>(scores, k + in_block + step / 4 * descriptor_step(kRowTile * kBlockRowBytes),
                                           q + in_block + step / 4 * descriptor_step(sizeof(shared.q[0])), step > 0);
    }
    wgmma_commit();
    pin(scores);
    const bool exists[2] = {(listed[0] >> (lane / 4) & 1) != 0, (listed[1] >> (lane / 4) & 1) != 0};
    wgmma_wait<0>();
    pin(scores);
    release(piece);
#pragma unroll
    for (int i = 0; i < 8; ++i) scores[i] = exists[i / 2 % 2] ? scores[i] * params.scale_log2 : -INFINITY;
  }

  __device__ __forceinline__ void add_values(std::uint32_t piece, Part& part) {
    const std::uint64_t v = descriptor_across_k(wait_for(piece), kRowTile * kBlockRowBytes),
                        weights = descriptor_k_major(shared_address(shared.weights[worker][tiles % 2]));
#pragma unroll
    for (auto& block : part.output) pin(block);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRowTile / 16; ++step) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        wgmma_shared<Element, kRowMostHeads, cute::SM90::GMMA::Major::MN>(
            part.output[block],
            v + step * descriptor_step(16 * kBlockRowBytes) + block * descriptor_step(kRowTile * kBlockRowBytes),
            weights + descriptor_step(step * 32), true);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (auto& block : part.output) pin(block);
    release(piece);
  }

  // A block of columns to those from `column` on.
  template <typename Parts>
  __device__ __forceinline__ void store(const Part& part, int block, Parts& parts, int column) const {
    const int heads = call().group();
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if (head(h) >= heads) continue;
      if (block == 0 && warp == 0 && lane < 4) {
        parts.maxima[worker][head(h)] = part.maximum[h];
        parts.sums[worker][head(h)] = part.sum[h];
      }
      float* to = parts.outputs[worker][head(h)] + column + 16 * warp + lane / 4;
#pragma unroll
      for (int r = 0; r < 2; ++r) to[8 * r] = part.output[block][h / 2 * 4 + 2 * r + h % 2];
    }
  }

  // All of a CTA's consumer warps, each time.
  __device__ __forceinline__ void meet() {
    warps_meet(&shared.met, meetings % 2, static_cast<int>(threadIdx.x));
    ++meetings;
  }

  // Of a row that the CTA has for itself.
  __device__ __forceinline__ void merge_alone(const Part& part) {
    auto& of_block = shared.block_parts;
    constexpr int kFours = kBlockColumns / 4;
    const int heads = call().group();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      store(part, block, of_block, 0);
      meet();
      for (int i = static_cast<int>(threadIdx.x); i < heads * kFours; i += Traits::kConsumers) {
        const int of_head = i / kFours, column = i % kFours * 4;
        RowPart parts[Traits::kLeaves];
#pragma unroll
        for (int leaf = 0; leaf < Traits::kLeaves; ++leaf) {
          parts[leaf] = {of_block.maxima[leaf][of_head], of_block.sums[leaf][of_head],
                         *reinterpret_cast<const float4*>(&of_block.outputs[leaf][of_head][column])};
        }
        merged(parts).store(params.call, row.row, row.kv_head * heads + of_head, block * kBlockColumns + column);
      }
      meet();
    }
  }
};

// What the workers of a cluster have of a row, by the consumers of all its CTAs; each CTA a part of the columns.
template <typename Traits>
__device__ __forceinline__ void merge_row(const QsaRowsParams& params, QsaRowShared<Traits>& shared,
                                          const QsaRow& row) {
  const auto of_cta = [](auto* mine, int cta) { return cooperative_groups::this_cluster().map_shared_rank(mine, cta); };
  const int heads = params.call.params.group(), rank = static_cast<int>(blockIdx.x) % Traits::kCtas;
  constexpr int kFours = Traits::kColumns / 4;
  for (int i = static_cast<int>(threadIdx.x); i < heads * kFours; i += Traits::kConsumers) {
    const int head = i / kFours, column = rank * Traits::kColumns + i % kFours * 4;
    RowPart parts[Traits::kLeaves];
#pragma unroll
    for (int leaf = 0; leaf < Traits::kLeaves; ++leaf) {
      const int worker = leaf % Traits::kWorkers, cta = leaf / Traits::kWorkers;
      parts[leaf].maximum = *of_cta(&shared.parts.maxima[worker][head], cta);
      parts[leaf].sum = *of_cta(&shared.parts.sums[worker][head], cta);
      parts[leaf].output = *reinterpret_cast<const float4*>(of_cta(&shared.parts.outputs[worker][head][column], cta));
    }
    merged(parts).store(params.call, row.row, row.kv_head * heads + head, column);
  }
}

// Rows before the first sequence and after the last get 0 and -inf. By `threads` threads of each CTA.
template <typename Traits>
__device__ __forceinline__ void store_rows_of_none(const QsaRowsParams& params, int thread, int threads) {
  const QsaParams& call = params.call.params;
  const std::int64_t first_end = call.rows.boundary(1);
  const std::int64_t last_begin = max(first_end, call.rows.boundary(call.rows.batch + 1));
  const std::int64_t rows = first_end + (call.rows.total - last_begin);
  constexpr int kFours = Traits::kHeadDim / 4;
  for (std::int64_t i = blockIdx.x; i < rows; i += params.num_clusters * Traits::kCtas) {
    const std::int64_t row = i < first_end ? i : last_begin + (i - first_end);
    for (int j = thread; j < call.num_q_heads * kFours; j += threads) {
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
  if (threadIdx.x < Traits::kWorkers * Traits::kPieces) {
    Barrier::init(&shared.full[0][threadIdx.x], Traits::kFeeders * (32 + 1));
    Barrier::init(&shared.empty[0][threadIdx.x], 4);
    if (threadIdx.x == 0) Barrier::init(&shared.met, Traits::kConsumers / 32);
    cutlass::arch::fence_barrier_init();
  }
  if (threadIdx.x % 32 == 0) shared.next_unit[threadIdx.x / 32] = QsaRowScan<Traits>::first_unit();
  cudaTriggerProgrammaticLaunchCompletion();
  bool takes = !params.sparse;
  if (params.sparse) {
    const RaggedRows& rows = params.call.params.rows;
    for (std::int64_t segment = threadIdx.x; segment < rows.num_segments() && !takes; segment += Traits::kThreads) {
      const std::int64_t size = rows.rows(segment).size();
      const bool owned = rows.owned(segment);
      takes = size > 0 && (params.apart.by_rows(size, owned) ||
                           params.apart.by_length(visible_length(params.call.params.cache_lengths[segment - 1], size)));
    }
  }
  if (!__syncthreads_or(takes)) {
    cudaGridDependencySynchronize();
    return;
  }
  QsaRowScan<Traits> scan{params, shared.next_unit};
  // A cluster has one unit at most. Its CTAs meet twice: the parts are there, and have been read.
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kProducers = Traits::kThreads - Traits::kConsumers;
  if (thread >= Traits::kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    QsaRowProducer<Traits> producer(params, shared);
    const auto entries = producer.guess_entries(scan.first_row());
#pragma unroll 1
    while (scan.find(producer.row)) {
      producer.stream(entries);
      if constexpr (kCtas > 1) break;
    }
    // Of a cluster they are done long before the others. (Of a CTA alone they have other rows to see to, and the copies
    // no register to spare.)
    if constexpr (kCtas > 1) store_rows_of_none<Traits>(params, thread - Traits::kConsumers, kProducers);
    cluster_sync<kCtas>(false);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    QsaRowConsumer<Traits> consumer(params, shared);
    if constexpr (kCtas == 1) {
#pragma unroll 1
      while (scan.find(consumer.row)) consumer.run();
    } else if (scan.find(consumer.row)) {
      consumer.run();
      cluster_sync<kCtas>(true);
      merge_row<Traits>(params, shared, consumer.row);
    } else {
      cluster_sync<kCtas>(false);
    }
  }
  cluster_sync<kCtas>(false);
  if constexpr (kCtas == 1) store_rows_of_none<Traits>(params, thread, Traits::kThreads);
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
  kernel_params.sequences_per_row = static_cast<float>(params.rows.batch) / static_cast<float>(params.rows.total);
  kernel_params.apart = qsa_apart(params.group());
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
