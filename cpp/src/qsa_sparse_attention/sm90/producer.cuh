// The producer warpgroup: plans what a group gathers, and gathers it.
//
// A group of several rows gathers the union of its lists, ascending: a bit for each row and token, a window of the
// context at a time (plan.h). A window in which a row lists a token twice has no such form: there, and for a group of
// one row, the lists are gathered as they stand.
//
// Each warp copies a quarter of every tile, and looks up where its tokens lie for several tiles at once, a token a
// lane: a batch. It does so ahead: while a batch is copied, the pages of the next are being looked up and the entries
// of the one after it read. A copy takes 16 bytes a thread, a token's row side by side; the barrier of a stage counts
// the threads whose copies have landed.
#pragma once

#include <type_traits>

#include "qsa_sparse_attention/sm90/params.cuh"

namespace ragged_attention::sm90 {

// Marks what the rows of a unit list of a window, by the producers or by both roles.
template <typename Traits>
struct QsaPlanner {
  static constexpr std::int32_t kNothingBeyond = 0x7fffffff;

  const QsaGroupsParams& params;
  QsaShared<Traits>& shared;
  const QsaUnit& unit;
  ContextShare<Traits::kSplits> share;
  int thread, threads;

  // Of the tokens whose local numbers lie in the 32 * words from `base` on. When all have called it, shared.beyond is
  // the first local number after the window that is listed, and shared.duplicate whether a row lists one twice.
  __device__ __forceinline__ void mark(std::int32_t base, std::int32_t words) {
    const QsaParams& call = params.call.params;
    std::uint32_t* masks = shared.plan;
    for (std::int32_t i = thread; i < unit.group.rows * words; i += threads) masks[i] = 0;
    if (thread == 0) {
      shared.beyond = kNothingBeyond;
      shared.duplicate = 0;
    }
    const int lane = thread % 32;
    std::int32_t counts = 0;  // lane r's is row r's
    if (lane < unit.group.rows) counts = static_cast<std::int32_t>(call.count(unit.group.begin + lane));
    meet(0);
    constexpr int kAtOnce = 9;  // loads in flight: by 256 threads, all of a list of 2051
    const auto places = static_cast<std::uint32_t>(32 * words), length = static_cast<std::uint32_t>(unit.length);
    std::int32_t beyond = kNothingBeyond;
    bool duplicate = false;
#pragma unroll 1
    for (int row = 0; row < unit.group.rows; ++row) {
      const std::int32_t count = __shfl_sync(0xffffffff, counts, row);
      const std::int32_t* list = call.token_indices + (unit.group.begin + row) * call.token_indices_row_stride;
      std::uint32_t* mine = masks + row * words;
#pragma unroll 1
      for (std::int32_t first = 0; first < count; first += kAtOnce * threads) {
        const std::int32_t i = first + thread;
        std::int32_t tokens[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) tokens[j] = i + j * threads < count ? list[i + j * threads] : -1;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (static_cast<std::uint32_t>(tokens[j]) >= length || !share.owns(tokens[j])) continue;
          const std::int32_t place = share.local(tokens[j]) - base;
          if (static_cast<std::uint32_t>(place) < places) {
            const std::uint32_t bit = 1u << place % 32;
            duplicate |= (atomicOr(&mine[static_cast<std::uint32_t>(place) / 32], bit) & bit) != 0;
          } else if (place > 0) {
            beyond = min(beyond, place + base);
          }
        }
      }
    }
    beyond = __reduce_min_sync(0xffffffff, beyond);
    if (thread % 32 == 0 && beyond != kNothingBeyond) atomicMin(&shared.beyond, beyond);
    if (duplicate) shared.duplicate = 1;
    meet(1);
  }

 private:
  // The first or the second time that those meet who mark a window: twice for each, so a barrier's phases are these.
  __device__ __forceinline__ void meet(std::uint32_t time) const {
    threads == Traits::kThreads ? warps_meet(&shared.planned, time, thread) : producers_sync();
  }
};

// Of a window of the unit's plan: no more than the CTA's share of the context has.
template <typename Traits>
__device__ __forceinline__ std::int32_t words_of(const QsaUnit& unit) {
  constexpr std::int32_t kGranule = ContextShare<Traits::kSplits>::kGranule;
  const std::int32_t granules = (unit.length / kGranule + Traits::kSplits) / Traits::kSplits;
  return min(plan_words(unit.group.rows), granules * (kGranule / 32));
}

template <typename Traits>
struct QsaProducer {
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kTokens = kKeys / Traits::kProducerWarps;  // of a tile, that are this warp's
  static constexpr int kBatch = 32 / kTokens;                     // tiles
  static constexpr int kThreads = 32 * Traits::kProducerWarps;

  const QsaGroupsParams& params;
  QsaShared<Traits>& shared;
  const QsaUnit& unit;
  ContextShare<Traits::kSplits> share;  // of this CTA
  Ring<1> k_ring, v_ring;

  __device__ __forceinline__ QsaProducer(const QsaGroupsParams& params_, QsaShared<Traits>& shared_, int rank)
      : params(params_), shared(shared_), unit(shared_.unit[kProduces]), share{rank} {}

  // Read anew wherever it is asked for: what follows from it would be worked out ahead, and take registers for good.
  __device__ __forceinline__ static int thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % 128;
  }
  __device__ __forceinline__ static int warp() { return thread() / 32; }
  __device__ __forceinline__ static int lane() { return thread() % 32; }
  __device__ __forceinline__ const QsaParams& call() const { return params.call.params; }

  // Everything that the unit's rows list, once.
  __device__ __forceinline__ void pass(bool again) {
    constexpr std::int32_t kNothingBeyond = QsaPlanner<Traits>::kNothingBeyond, kNoPlan = -1;
    const std::int32_t words = words_of<Traits>(unit);
    std::int32_t base = unit.group.owned ? 0 : kNothingBeyond;  // of the window
    std::int32_t next = kNothingBeyond, tokens = 0;             // window after it; of its plan
    int done = 0, parts = 0;  // of the window: lists as they stand, or parts of its plan
    // Both roles mark the first window: nobody has anything else to do yet.
    int planners = again ? kThreads : Traits::kThreads;
#pragma unroll 1
    while (base != kNothingBeyond) {
      if (done == parts) {
        done = 0;
        tokens = kNoPlan;
        parts = unit.group.rows;
        if (unit.group.rows > 1) {
          QsaPlanner<Traits>{params, shared, unit, share, thread(), planners}.mark(base, words);
          planners = kThreads;
          next = shared.beyond == kNothingBeyond ? kNothingBeyond : shared.beyond / 32 * 32;
          if (shared.duplicate == 0) {
            tokens = rank_words(words);
            parts = (tokens + kQsaListEntries - 1) / kQsaListEntries;
          }
        }
      }
      if (done < parts) {
        QsaSource source{done, base, words, 0, 0};
        if (tokens != kNoPlan) {
          write_list(words, done * kQsaListEntries);
          source.row = QsaSource::kPlanned;
          source.end = min(tokens - done * kQsaListEntries, kQsaListEntries);
        } else {
          source.end = count_of(done);
          if (unit.group.rows == 1) {
            source.begin = list_share(source.end, Traits::kSplits, share.rank);
            source.end = list_share(source.end, Traits::kSplits, share.rank + 1);
          }
        }
        stream(source);
        ++done;
      }
      if (done == parts) {
        producers_sync();  // the plan has been read
        base = next;
      }
    }
    end_pass();
  }

 private:
  // Says so in the place of a tile.
  __device__ __forceinline__ void end_pass() {
    Barrier::wait(&shared.k_empty, k_ring.empty_parity());
    if (lane() == 0) {
      shared.end = 1;
      Barrier::arrive(&shared.k_full);
    }
    Barrier::arrive(&shared.k_full);
    k_ring.advance();
  }

  // Entry i: of a plan, the place in its window; of a list, as it comes, perhaps still on its way.
  __device__ __forceinline__ std::int32_t entry(std::int32_t i) const {
    if (i >= shared.source.end) return kNoToken;
    if (shared.source.row == QsaSource::kPlanned) return shared.list[i];
    return list_of(shared.source.row)[i];
  }
  __device__ __forceinline__ std::int32_t token_of(std::int32_t entry) const {
    if (shared.source.row == QsaSource::kPlanned)
      return entry == kNoToken ? kNoToken : share.token(shared.source.base + entry);
    const std::int32_t token = in_sequence(entry);
    if (unit.group.rows == 1 || token == kNoToken) return token;
    const std::int32_t place = share.local(token) - shared.source.base;
    return share.owns(token) && place >= 0 && place < 32 * shared.source.words ? token : kNoToken;
  }

  // Which lanes' entries each row lists: lane r gets row r's.
  __device__ __forceinline__ std::uint32_t lists(std::int32_t entry, bool valid) const {
    if (shared.source.row != QsaSource::kPlanned) {
      const std::uint32_t all = __ballot_sync(0xffffffff, valid);
      return lane() == shared.source.row ? all : 0;
    }
    const std::uint32_t* word = shared.plan + (valid ? entry / 32 : 0);
    std::uint32_t result = 0;
#pragma unroll 5
    for (int row = 0; row < unit.group.rows; ++row) {
      const std::uint32_t bits =
          __ballot_sync(0xffffffff, valid && (word[row * shared.source.words] >> (entry % 32) & 1) != 0);
      if (lane() == row) result = bits;
    }
    return result;
  }

  __device__ __forceinline__ std::int32_t count_of(int row) const {
    return static_cast<std::int32_t>(call().count(unit.group.begin + row));
  }
  __device__ __forceinline__ const std::int32_t* list_of(int row) const {
    return call().token_indices + (unit.group.begin + row) * call().token_indices_row_stride;
  }
  __device__ __forceinline__ std::int32_t in_sequence(std::int32_t token) const {
    return token >= 0 && token < unit.length ? token : kNoToken;
  }

  // --- The plan

  // The words of this thread: a run of them.
  __device__ __forceinline__ static std::int32_t first_word(std::int32_t words, int thread) {
    return min(thread * ((words + kThreads - 1) / kThreads), words);
  }

  // Counts the tokens that are listed: all of them, and for write_list() those before this thread's words.
  __device__ __forceinline__ std::int32_t rank_words(std::int32_t words) {
    const std::int32_t end = first_word(words, thread() + 1);
    std::int32_t mine = 0;
#pragma unroll 1
    for (std::int32_t word = first_word(words, thread()); word < end; ++word) {
      mine += population(listed_by_any(shared.plan, unit.group.rows, words, word));
    }
    std::int32_t up_to = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t lower = __shfl_up_sync(0xffffffff, up_to, step);
      if (lane() >= step) up_to += lower;
    }
    if (lane() == 31) shared.warp_total[warp()] = up_to;
    producers_sync();
    std::int32_t before = up_to - mine, total = 0;
#pragma unroll
    for (int w = 0; w < Traits::kProducerWarps; ++w) {
      if (w < warp()) before += shared.warp_total[w];
      total += shared.warp_total[w];
    }
    shared.before[thread()] = static_cast<std::uint16_t>(before);
    return total;
  }

  // The places of the tokens from rank `first` on.
  __device__ __forceinline__ void write_list(std::int32_t words, std::int32_t first) {
    producers_sync();  // the list has been read, and all of `before` written
    const std::int32_t end = first_word(words, thread() + 1);
    std::int32_t rank = shared.before[thread()];
#pragma unroll 1
    for (std::int32_t word = first_word(words, thread()); word < end; ++word) {
      const std::uint32_t any = listed_by_any(shared.plan, unit.group.rows, words, word);
      write_places(any, 32 * word, rank, first, shared.list);
      rank += population(any);
    }
  }

  // --- The gather

  __device__ __forceinline__ PageLookup pages() const { return {call().cache, params.page_shift}; }

  __device__ __forceinline__ void stream(const QsaSource& source) {
    producers_sync();  // the last one has been read
    if (thread() == 0) shared.source = source;
    producers_sync();
    constexpr std::int32_t kEntries = kBatch * kKeys;
    const std::int32_t mine = lane() / kTokens * kKeys + warp() * kTokens + lane() % kTokens;  // of a batch
    std::int32_t now = entry(shared.source.begin + mine);
    std::int32_t token = token_of(now);
    PageEntry page = pages().read(unit.sequence, token);
    std::int32_t ahead = entry(shared.source.begin + kEntries + mine);
#pragma unroll 1
    for (std::int32_t first = shared.source.begin; first < shared.source.end; first += kEntries) {
      const bool valid = pages().exists(page);
      const std::int64_t offset = valid ? pages().offset(token, page, unit.kv_head) : kNowhere;
      const std::uint32_t listed = lists(now, valid);  // lane r's are row r's
      now = ahead;
      token = token_of(now);
      page = pages().read(unit.sequence, token);
      ahead = entry(first + 2 * kEntries + mine);
#pragma unroll 1
      for (int tile = 0; tile < kBatch && first + tile * kKeys < shared.source.end; ++tile) {
        Barrier::wait(&shared.k_empty, k_ring.empty_parity());
        if (lane() < unit.group.rows) {
          using Bits = std::conditional_t<kTokens == 16, std::uint16_t, std::uint32_t>;
          reinterpret_cast<Bits*>(shared.listed[lane()])[warp()] = static_cast<Bits>(listed >> (tile * kTokens));
        }
        if (thread() == 0) shared.end = 0;
        copy(call().cache.k, offset, tile * kTokens, shared.k);
        arrive_after_copies(&shared.k_full);
        __syncwarp();
        if (lane() == 0) Barrier::arrive(&shared.k_full);
        k_ring.advance();
        Barrier::wait(&shared.v_empty, v_ring.empty_parity());
        copy(call().cache.v, offset, tile * kTokens, shared.v);
        arrive_after_copies(&shared.v_full);
        v_ring.advance();
      }
    }
  }

  // This warp's part of a tile.
  __device__ __forceinline__ void copy(const void* data, std::int64_t offset, int from_lane, const void* tile) const {
    copy_tokens<kKeys, kTokens, Traits::kBlocks>(data, offset, from_lane, shared_address(tile), warp() * kTokens,
                                                 lane());
  }
};

}  // namespace ragged_attention::sm90
