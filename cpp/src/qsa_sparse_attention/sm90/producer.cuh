// The producer warpgroup: plans what a group gathers, and gathers it.
//
// A group of several rows gathers the union of its lists, ascending: a bit for each row and token, a window of the
// context at a time (plan.h). A window in which a row lists a token twice has no such form: there, and for a group of
// one row, the lists are gathered as they stand.
//
// Each warp copies a quarter of every tile, and looks up where its tokens lie for several tiles at once, a token a lane:
// a batch. It does so ahead: while a batch is copied, the pages of the next are being looked up and the entries of the
// one after it read. A copy takes 16 bytes a thread, a token's row side by side; the barrier of a stage counts the
// threads whose copies have landed.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "qsa_sparse_attention/sm90/params.cuh"

namespace ragged_attention::sm90 {

// Marks what the rows of a unit list of a window, by kThreads threads.
template <typename Traits, int kThreads>
struct QsaPlanner {
  static constexpr std::int32_t kNothingBeyond = 0x7fffffff;

  const QsaHopperParams& params;
  QsaShared<Traits>& shared;
  const QsaUnit& unit;
  ContextShare<Traits::kSplits> share;
  int thread;

  __device__ __forceinline__ static void sync() {
    cutlass::arch::NamedBarrier::sync(kThreads, kThreads == 256 ? kPlanners : kProducers);
  }

  // Of the tokens whose local numbers lie in the 32 * words from `base` on. When all have called it, shared.beyond is
  // the first local number after the window that is listed, and shared.duplicate whether a row lists one twice.
  __device__ __forceinline__ void mark(std::int32_t base, std::int32_t words) {
    const QsaParams& call = params.call.params;
    std::uint32_t* masks = plan_in(shared.plan, unit.group.rows, words).rows;
    for (std::int32_t i = thread; i < unit.group.rows * words; i += kThreads) masks[i] = 0;
    if (thread == 0) {
      shared.beyond = kNothingBeyond;
      shared.duplicate = 0;
    }
    sync();
    constexpr int kAtOnce = 8;  // loads in flight
    const auto places = static_cast<std::uint32_t>(32 * words), length = static_cast<std::uint32_t>(unit.length);
    std::int32_t beyond = kNothingBeyond;
    bool duplicate = false;
#pragma unroll 1
    for (int row = 0; row < unit.group.rows; ++row) {
      const auto count = static_cast<std::int32_t>(call.count(unit.group.begin + row));
      const std::int32_t* list = call.token_indices + (unit.group.begin + row) * call.token_indices_row_stride;
      std::uint32_t* mine = masks + row * words;
#pragma unroll 1
      for (std::int32_t i = thread; i < count; i += kAtOnce * kThreads) {
        std::int32_t tokens[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) tokens[j] = i + j * kThreads < count ? list[i + j * kThreads] : -1;
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
    sync();
  }
};

template <typename Traits>
struct QsaProducer {
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kTokens = kKeys / Traits::kProducerWarps;  // of a tile, that are this warp's
  static constexpr int kBatch = 32 / kTokens;                     // tiles
  static constexpr int kThreads = 32 * Traits::kProducerWarps;
  static constexpr std::int32_t kNone = -1;                       // no token
  static constexpr std::int32_t kNothingBeyond = 0x7fffffff;

  const QsaHopperParams& params;
  QsaShared<Traits>& shared;
  const QsaUnit& unit;
  ContextShare<Traits::kSplits> share;  // of this CTA
  Ring<1> k_ring, v_ring;
  std::int32_t first_word = 0;  // of the plan, with the first entry of the batch looked up last

  __device__ __forceinline__ QsaProducer(const QsaHopperParams& params_, QsaShared<Traits>& shared_, int rank)
      : params(params_), shared(shared_), unit(shared_.unit[kProduces]), share{rank} {}

  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x) % 128; }
  __device__ __forceinline__ static int warp() { return thread() / 32; }
  __device__ __forceinline__ static int lane() { return thread() % 32; }
  __device__ __forceinline__ const QsaParams& call() const { return params.call.params; }

  // Everything that the unit's rows list, once.
  __device__ __forceinline__ void pass(bool again) {
    const std::int32_t words = plan_words(unit.group.rows);
    std::int32_t base = unit.group.owned ? 0 : kNothingBeyond;
    if (!again && unit.needs_plan()) QsaPlanner<Traits, 256>{params, shared, unit, share, thread()}.mark(base, words);
#pragma unroll 1
    while (base != kNothingBeyond) {
      std::int32_t next = kNothingBeyond;
      // Rows whose lists are gathered as they stand; without any, the plan is.
      int row = 0, rows = unit.group.rows;
      std::int32_t planned = 0;
      if (rows > 1) {
        if (again || base != 0) QsaPlanner<Traits, kThreads>{params, shared, unit, share, thread()}.mark(base, words);
        next = make_plan(words, &planned);
        if (planned >= 0) rows = 1;
      }
#pragma unroll 1
      for (; row < rows; ++row) {
        Source source{row, base, words, 0, planned};
        if (unit.group.rows == 1) {
          const std::int32_t count = count_of(0);
          source.begin = list_share(count, Traits::kSplits, share.rank);
          source.end = list_share(count, Traits::kSplits, share.rank + 1);
        } else if (planned < 0) {
          source.end = count_of(row);
        } else {
          source.row = kPlanned;
        }
        stream(source);
      }
      if (unit.group.rows > 1) producers_sync();  // the plan has been read
      base = next;
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

  // What is gathered: the plan of a window, or what a row lists of it.
  static constexpr int kPlanned = -1;
  struct Source {
    int row;  // of the group; or kPlanned
    std::int32_t base, words;
    std::int32_t begin, end;  // entries
  };

  // Entry i of the batch that starts at `first`: of a plan, the place in its window; of a list, as it comes, perhaps still
  // on its way.
  __device__ __forceinline__ std::int32_t entry(const Source& source, std::int32_t first, std::int32_t i) {
    if (first >= source.end) return kNone;
    if (source.row != kPlanned) return i < source.end ? list_of(source.row)[i] : kNone;
    const Plan plan = this->plan(source.words);
    const std::int32_t rank = min(i, source.end - 1);
    constexpr std::int32_t kNear = 64;  // words that a batch seldom goes beyond
    const std::int32_t left = source.words - first_word;
    const bool near = left > kNear && plan.before[first_word + kNear] > first + kBatch * kKeys;
    const std::int32_t word = word_of_rank(plan.before, first_word, near ? kNear : left, rank);
    first_word = __shfl_sync(0xffffffff, word, 0);
    return i < source.end ? 32 * word + nth_bit(plan.any[word], rank - plan.before[word]) : kNone;
  }
  __device__ __forceinline__ std::int32_t token_of(const Source& source, std::int32_t entry) const {
    if (source.row == kPlanned) return entry == kNone ? kNone : share.token(source.base + entry);
    const std::int32_t token = in_sequence(entry);
    if (unit.group.rows == 1 || token == kNone) return token;
    const std::int32_t place = share.local(token) - source.base;
    return share.owns(token) && place >= 0 && place < 32 * source.words ? token : kNone;
  }

  // Which lanes' entries each row lists: lane r gets row r's.
  __device__ __forceinline__ std::uint32_t lists(const Source& source, std::int32_t entry, bool valid) const {
    if (source.row != kPlanned) {
      const std::uint32_t all = __ballot_sync(0xffffffff, valid);
      return lane() == source.row ? all : 0;
    }
    const std::uint32_t* word = plan(source.words).rows + (valid ? entry / 32 : 0);
    std::uint32_t result = 0;
#pragma unroll 5
    for (int row = 0; row < unit.group.rows; ++row) {
      const std::uint32_t bits = __ballot_sync(0xffffffff, valid && (word[row * source.words] >> (entry % 32) & 1) != 0);
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
    return token >= 0 && token < unit.length ? token : kNone;
  }

  // --- The plan

  __device__ __forceinline__ Plan plan(std::int32_t words) const { return plan_in(shared.plan, unit.group.rows, words); }

  // From the marks: `tokens` are listed, or under 0 if a row lists one of them twice. Returns where the next window
  // starts.
  __device__ __forceinline__ std::int32_t make_plan(std::int32_t words, std::int32_t* tokens) {
    const std::int32_t beyond = shared.beyond;
    const bool duplicate = shared.duplicate != 0;
    *tokens = rank_words(words, plan(words));  // and everybody has read `beyond`
    if (duplicate) *tokens = -1;
    return beyond == kNothingBeyond ? beyond : beyond / 32 * 32;
  }

  // Fills `any` and `before`; returns the number of tokens. Each thread has a run of words.
  __device__ __forceinline__ std::int32_t rank_words(std::int32_t words, const Plan& plan) {
    const std::int32_t run = (words + kThreads - 1) / kThreads;
    const std::int32_t begin = min(thread() * run, words), end = min(begin + run, words);
    std::int32_t mine = 0;
    for (std::int32_t word = begin; word < end; ++word) {
      std::uint32_t any = 0;
      for (int row = 0; row < unit.group.rows; ++row) any |= plan.rows[row * words + word];
      plan.any[word] = any;
      mine += population(any);
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
    for (std::int32_t word = begin; word < end; ++word) {
      plan.before[word] = static_cast<std::uint16_t>(before);
      before += population(plan.any[word]);
    }
    producers_sync();
    return total;
  }

  // --- The gather

  // What the table has for a token, still on its way: two words, of which the upper is not always there.
  struct Page {
    std::uint32_t low = 0xffffffff, high = 0;
  };
  __device__ __forceinline__ Page page_of(std::int32_t token) const {
    Page page;
    if (token == kNone) return page;
    const IntegerMatrix& table = call().cache.lookup_table;
    // In the table: the sequence's `length` is within it.
    const std::int64_t at = unit.sequence * table.row_stride + slot_of(token) * table.row0.stride;
    const auto* words = static_cast<const std::uint32_t*>(table.row0.data);
    if (table.row0.type == IntegerType::kI64) {
      page.low = words[2 * at];
      page.high = words[2 * at + 1];
    } else {
      page.low = words[at];
    }
    return page;
  }
  __device__ __forceinline__ std::int32_t slot_of(std::int32_t token) const {
    if (params.page_shift >= 0) return token >> params.page_shift;
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(token) /
                                     static_cast<std::uint32_t>(call().cache.page_size));
  }
  __device__ __forceinline__ bool exists(Page page) const {
    return page.high == 0 && page.low < static_cast<std::uint64_t>(call().cache.num_pages);
  }
  // In bytes, from the first of head 0 on.
  __device__ __forceinline__ std::int64_t offset_of(std::int32_t token, Page page) const {
    const PagedCache& cache = call().cache;
    const std::int32_t within = token - slot_of(token) * static_cast<std::int32_t>(cache.page_size);
    return 2 * (unit.kv_head * cache.head_stride + page.low * cache.page_stride + within * cache.token_stride);
  }

  __device__ __forceinline__ void stream(const Source& source) {
    constexpr std::int32_t kEntries = kBatch * kKeys;
    const std::int32_t mine = lane() / kTokens * kKeys + warp() * kTokens + lane() % kTokens;  // of a batch
    first_word = 0;
    std::int32_t now = entry(source, source.begin, source.begin + mine);
    std::int32_t token = token_of(source, now);
    Page page = page_of(token);
    std::int32_t ahead = entry(source, source.begin + kEntries, source.begin + kEntries + mine);
#pragma unroll 1
    for (std::int32_t first = source.begin; first < source.end; first += kEntries) {
      const bool valid = exists(page);
      const std::int64_t offset = offset_of(token, page);
      __syncwarp();  // the last batch's have been read
      shared.source[0][warp()][lane()] = valid ? static_cast<const char*>(call().cache.k) + offset : zeros();
      shared.source[1][warp()][lane()] = valid ? static_cast<const char*>(call().cache.v) + offset : zeros();
      const std::uint32_t listed = lists(source, now, valid);  // lane r's are row r's
      __syncwarp();
      now = ahead;
      token = token_of(source, now);
      page = page_of(token);
      ahead = entry(source, first + 2 * kEntries, first + 2 * kEntries + mine);
#pragma unroll 1
      for (int tile = 0; tile < kBatch && first + tile * kKeys < source.end; ++tile) {
        Barrier::wait(&shared.k_empty, k_ring.empty_parity());
        if (lane() < unit.group.rows) {
          using Bits = std::conditional_t<kTokens == 16, std::uint16_t, std::uint32_t>;
          reinterpret_cast<Bits*>(shared.listed[lane()])[warp()] =
              static_cast<Bits>(listed >> (tile * kTokens));
        }
        if (thread() == 0) shared.end = 0;
        copy(shared_address(shared.k), shared.source[0][warp()] + tile * kTokens);
        arrive_after_copies(&shared.k_full);
        __syncwarp();
        if (lane() == 0) Barrier::arrive(&shared.k_full);
        k_ring.advance();
        Barrier::wait(&shared.v_empty, v_ring.empty_parity());
        copy(shared_address(shared.v), shared.source[1][warp()] + tile * kTokens);
        arrive_after_copies(&shared.v_full);
        v_ring.advance();
      }
    }
  }

  // This warp's part of a tile: eight lanes side by side copy 128 bytes of a token, the warp those of four tokens.
  __device__ __forceinline__ void copy(std::uint32_t to, const char* const* sources) const {
    const int token = lane() / 8, chunk = lane() % 8;
    const char* from[kTokens / 4];
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) from[i] = sources[4 * i + token] + chunk * 16;
    to += chunk_offset<kKeys>(warp() * kTokens + token, chunk);
    copy_rows(to, rows_down(to, 4), from, std::make_index_sequence<kTokens / 4>{});
  }
  // The chunks of every second four tokens are swapped alike.
  template <std::size_t... I>
  __device__ __forceinline__ void copy_rows(std::uint32_t even, std::uint32_t odd, const char* const (&from)[kTokens / 4],
                                            std::index_sequence<I...>) const {
    (copy_row<static_cast<int>(I / 2 * 8 * kBlockRowBytes)>(I % 2 == 0 ? even : odd, from[I],
                                                            std::make_index_sequence<Traits::kBlocks>{}),
     ...);
  }
  template <int kTo, std::size_t... kBlock>
  __device__ __forceinline__ void copy_row(std::uint32_t to, const char* from, std::index_sequence<kBlock...>) const {
    (copy_16<kTo + static_cast<int>(kBlock) * kKeys * kBlockRowBytes, static_cast<int>(kBlock) * kBlockRowBytes>(to,
                                                                                                               from),
     ...);
  }

  // What is gathered in the place of a token that does not exist.
  __device__ __forceinline__ static const char* zeros() { return reinterpret_cast<const char*>(kZeroRow); }
};

}  // namespace ragged_attention::sm90
