// The plan of a group: the union of its rows' lists, ascending, and which rows list each token. Host+device arithmetic.
//
// A plan covers a window of the context: for each of the group's rows a bit for every token, and over them the number
// of tokens that any row lists before each word of 32. Entry `rank` of the union is then found by a search.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "qsa_sparse_attention/sm90/config.h"

namespace ragged_attention::sm90 {

// The part of a context that one CTA of a cluster gathers for a group of several rows: every kQsaSplits-th granule of 64
// tokens, numbered through without the others'.
template <std::int32_t kSplits>
struct ContextShare {
  static constexpr std::int32_t kGranule = 64;
  std::int32_t rank = 0;

  RAGGED_ATTENTION_HOST_DEVICE bool owns(std::int32_t token) const { return kSplits == 1 || token / kGranule % kSplits == rank; }
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

// A plan in its memory.
struct Plan {
  std::uint32_t* rows;    // [rows][words]
  std::uint32_t* any;     // [words]
  std::uint16_t* before;  // [words]
};
RAGGED_ATTENTION_HOST_DEVICE Plan plan_in(void* memory, std::int32_t rows, std::int32_t words) {
  auto* masks = static_cast<std::uint32_t*>(memory);
  return {masks, masks + rows * words, reinterpret_cast<std::uint16_t*>(masks + (rows + 1) * words)};
}

// Words of 32 tokens in a window of a group's plan, within kQsaPlanBytes: a word for each row, one for the union, and 2
// bytes for its rank.
RAGGED_ATTENTION_HOST_DEVICE std::int32_t plan_words(std::int32_t rows) {
  return kQsaPlanBytes / (4 * (rows + 1) + 2) / 4 * 4 - 4;
}

// The last of the `words` words (at least 1) from `first` on before which at most `rank` tokens lie.
RAGGED_ATTENTION_HOST_DEVICE std::int32_t word_of_rank(const std::uint16_t* before, std::int32_t first,
                                                       std::int32_t words, std::int32_t rank) {
  for (std::int32_t left = words; left > 1;) {
    const std::int32_t half = left / 2;
    if (before[first + half] <= rank) first += half;
    left -= half;
  }
  return first;
}

RAGGED_ATTENTION_HOST_DEVICE std::int32_t population(std::uint32_t word) {
#ifdef __CUDA_ARCH__
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}

// Place of the n-th set bit, from 0; n is under population(word).
RAGGED_ATTENTION_HOST_DEVICE std::int32_t nth_bit(std::uint32_t word, std::int32_t n) {
  std::int32_t place = 0;
  for (std::int32_t width = 16; width > 0; width /= 2) {
    const std::int32_t below = population(word >> place & ((1u << width) - 1));
    if (n >= below) {
      n -= below;
      place += width;
    }
  }
  return place;
}

}  // namespace ragged_attention::sm90
