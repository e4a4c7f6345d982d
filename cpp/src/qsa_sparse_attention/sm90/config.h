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

// Sequences of at most kQsaApartRows rows, and the rows of none, have a kernel of their own (row_kernel.cuh) where the
// query heads of a kv head are no more than the rows of its product. So few rows are done before a plan is made.
constexpr int kQsaApartRows = 32;
constexpr int kRowMostHeads = 16;
RAGGED_ATTENTION_HOST_DEVICE bool qsa_has_apart(int heads_per_kv_head) { return heads_per_kv_head <= kRowMostHeads; }
RAGGED_ATTENTION_HOST_DEVICE bool qsa_is_apart(std::int64_t rows, bool owned) {
  return !owned || rows <= kQsaApartRows;
}

}  // namespace ragged_attention::sm90
