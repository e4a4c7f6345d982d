// The plan of a group: the union of its rows' lists, ascending, and which rows list each token. Host+device arithmetic.
//
// A plan covers a window of the context with a bit for every row and token, in words of 32 tokens. From the words, the
// union is written out as places in the window, kQsaListEntries at a time.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "qsa_sparse_attention/sm90/config.h"

namespace ragged_attention::sm90 {

// The part of a context that one CTA of a cluster gathers for a group of several rows: every kQsaSplits-th granule of
// 64 tokens, numbered through without the others'.
template <std::int32_t kSplits>
struct ContextShare {
  static constexpr std::int32_t kGranule = 64;
  std::int32_t rank = 0;

  RAGGED_ATTENTION_HOST_DEVICE bool owns(std::int32_t token) const {
    return kSplits == 1 || token / kGranule % kSplits == rank;
  }
  // Number of a token among those it owns, and back.
  RAGGED_ATTENTION_HOST_DEVICE std::int32_t local(std::int32_t token) const {
    return kSplits == 1 ? token : token / kGranule / kSplits * kGranule + token % kGranule;
  }
  RAGGED_ATTENTION_HOST_DEVICE std::int32_t token(std::int32_t local) const {
    return kSplits == 1 ? local : (local / kGranule * kSplits + rank) * kGranule + local % kGranule;
  }
};

// The part of a single row's list that one CTA of a cluster gathers.
RAGGED_ATTENTION_HOST_DEVICE std::int32_t list_share(std::int32_t count, std::int32_t splits, std::int32_t rank) {
  return static_cast<std::int32_t>(std::int64_t{count} * rank / splits);
}

RAGGED_ATTENTION_HOST_DEVICE std::int32_t population(std::uint32_t word) {
#ifdef __CUDA_ARCH__
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}

RAGGED_ATTENTION_HOST_DEVICE std::int32_t lowest_bit(std::uint32_t word) {
#ifdef __CUDA_ARCH__
  return __ffs(static_cast<int>(word)) - 1;
#else
  return __builtin_ctz(word);
#endif
}

// Tokens that any row lists, of a word.
RAGGED_ATTENTION_HOST_DEVICE std::uint32_t listed_by_any(const std::uint32_t* masks, std::int32_t rows,
                                                         std::int32_t words, std::int32_t word) {
  std::uint32_t any = 0;
  for (std::int32_t row = 0; row < rows; ++row) any |= masks[row * words + word];
  return any;
}

// Writes the places of the set bits of a word, `place` on, whose ranks are in [first, first + kQsaListEntries), to
// list[rank - first]; the lowest has the rank `rank`.
RAGGED_ATTENTION_HOST_DEVICE void write_places(std::uint32_t bits, std::int32_t place, std::int32_t rank,
                                               std::int32_t first, std::uint16_t* list) {
  for (; bits != 0 && rank < first + kQsaListEntries; bits &= bits - 1, ++rank) {
    if (rank >= first) list[rank - first] = static_cast<std::uint16_t>(place + lowest_bit(bits));
  }
}

}  // namespace ragged_attention::sm90
