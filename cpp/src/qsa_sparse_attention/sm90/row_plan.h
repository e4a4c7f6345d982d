// How a single row's list is dealt out to tiles, chains of tiles, and the workers and CTAs that share a row.
// Host+device arithmetic.
//
// Tile t holds entries [64 t, 64 t + 64) of the list: the rows of a product. A row has eight chains, each a run of
// tiles with a softmax of its own, and the chains are merged two by two, then the pairs, then the halves. A cluster of
// 1, 2, 4 or 8 CTAs shares a row; a CTA's workers are two warpgroups, of eight CTAs one each. A worker has 4, 2, 1 or 1
// chains, one after the other. Every sum has the same order for any number of CTAs, and so the result the same bits.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace ragged_attention::sm90 {

constexpr int kRowChains = 8;
constexpr int kRowTile = 64;  // entries

constexpr int row_workers(int ctas) { return ctas == kRowChains ? 1 : 2; }  // of a CTA

// K or V of a tile is a piece. Pieces that a CTA has on their way or in use: 192 KB, at head dim 64 128 KB.
template <int kHeadDim>
constexpr int kRowPieces = kHeadDim == 256 ? 6 : (kHeadDim == 128 ? 12 : 16);

// First tile of a chain of a list of `count` entries; of chain kRowChains, the end.
RAGGED_ATTENTION_HOST_DEVICE std::int32_t row_chain_begin(std::int32_t count, std::int32_t chain) {
  const std::int32_t tiles = count / kRowTile + (count % kRowTile != 0 ? 1 : 0);
  return static_cast<std::int32_t>(std::int64_t{tiles} * chain / kRowChains);
}

// The sequence of a row, if all have as many rows; one of the batch's whatever they have, -1 where there is none.
RAGGED_ATTENTION_HOST_DEVICE std::int64_t likely_sequence(std::int32_t row, std::int64_t batch,
                                                          float sequences_per_row) {
  const auto guess = static_cast<std::int64_t>((static_cast<float>(row) + 0.5f) * sequences_per_row);
  const std::int64_t last = batch - 1;
  return guess < last ? guess : last;
}

// CTAs that share a unit of work, where a cluster of 2, 4, 8 CTAs finds room `room[0]`, `room[1]`, `room[2]` times at
// once: as many as leave room for all units.
RAGGED_ATTENTION_HOST_DEVICE int row_ctas(std::int64_t units, const int (&room)[3]) {
  for (int i = 2; i >= 0; --i) {
    if (units <= room[i]) return 2 << i;
  }
  return 1;
}

}  // namespace ragged_attention::sm90
