// The Hopper kernels of qsa_sparse_attention: their shapes. Host code reads it too.
//
// Groups of rows: a CTA has one consumer warpgroup, whose 64 rows of a wgmma are the query heads of one kv head times a
// few neighbouring rows, and one producer warpgroup, which plans and gathers. Two CTAs share a multiprocessor, so that
// one gathers while the other plans, waits or stores.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace ragged_attention::sm90 {

// Shared memory of a CTA at head dim 256: Q, K and V 32 KB each, and the plan 12 KB: 112 of the 113 KB that let two of
// them in. One stage of K and one of V: K of the next tile is on its way under softmax and P V, V under Q K^T. Two of
// half the size took longer for every tile of half the size. Registers a thread: 128 for O, kKeys / 2 for S and about
// 40 more; P takes the place of S.
template <int kHeadDim>
struct QsaTile;
template <>
struct QsaTile<256> {
  static constexpr int kKeys = 64;
};
template <>
struct QsaTile<128> {
  static constexpr int kKeys = 128;
};
template <>
struct QsaTile<64> {
  static constexpr int kKeys = 128;
};

constexpr int kQsaPlanBytes = 9 * 1024;  // a bit for each row and token of a window
constexpr int kQsaListEntries = 1536;    // of the union that are written out at a time, 2 bytes each

// Sequences of at most this many rows in a call, and not so few that they are apart, are short: each group of their
// rows is shared out to a cluster of kQsaSplits CTAs. Longer ones have groups enough to fill the GPU, one CTA each.
constexpr std::int64_t kQsaShortRows = 128;
constexpr int kQsaSplits = 4;

// Neighbouring rows that share what they gather: as many as fit 64 rows of a product, up to 10.
constexpr int kQsaMaxGroupRows = 10;
RAGGED_ATTENTION_HOST_DEVICE int qsa_group_rows(int heads_per_kv_head) {
  const int fit = 64 / heads_per_kv_head;
  return fit < kQsaMaxGroupRows ? fit : kQsaMaxGroupRows;
}

// Words of 32 tokens in a window of a group's plan: one for each row, within kQsaPlanBytes.
RAGGED_ATTENTION_HOST_DEVICE std::int32_t plan_words(std::int32_t rows) { return kQsaPlanBytes / (4 * rows); }

// Which sequences have a kernel of their own that goes row by row (row_kernel.cuh), where the query heads of a kv head
// are no more than the columns of its product. Few rows are done before a plan is made; and every list is read once for
// each window of a plan, which beyond so many windows takes longer than what neighbours share. And the rows of none.
constexpr int kQsaApartRows = 32, kQsaMostWindows = 13;
constexpr int kRowMostHeads = 16;
struct QsaApart {
  std::int32_t most_rows = -1, most_tokens = 0;  // without such a kernel, -1

  RAGGED_ATTENTION_HOST_DEVICE bool by_rows(std::int64_t rows, bool owned) const {
    return most_rows >= 0 && (!owned || rows <= most_rows);
  }
  // Of a sequence, whose rows may name `length` tokens.
  RAGGED_ATTENTION_HOST_DEVICE bool by_length(std::int64_t length) const {
    return most_rows >= 0 && length > most_tokens;
  }
};
RAGGED_ATTENTION_HOST_DEVICE bool qsa_has_apart(int heads_per_kv_head) { return heads_per_kv_head <= kRowMostHeads; }
RAGGED_ATTENTION_HOST_DEVICE QsaApart qsa_apart(int heads_per_kv_head) {
  if (!qsa_has_apart(heads_per_kv_head)) return {};
  return {kQsaApartRows, kQsaMostWindows * 32 * plan_words(qsa_group_rows(heads_per_kv_head))};
}

}  // namespace ragged_attention::sm90
