// How a single row's list is dealt out to tiles, chains of tiles and warps; and how what they gather lies in shared
// memory. Host+device arithmetic.
//
// Tile t holds entries [16 t, 16 t + 16) of the list. Chain c has the tiles t = c mod 8, in their order, and a softmax
// of its own; the eight chains are merged in their order. A warp for every chain is what one CTA has; a cluster of
// kCtas gives every chain kCtas warps of one CTA. Those compute the scores of a tile each, a round at a time, and each
// sums kHeadDim / kCtas columns of the values of all tiles. So every sum has the same order for any number of CTAs, and
// the result the same bits.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace ragged_attention::sm90 {

constexpr int kRowChains = 8;  // and warps of a CTA
constexpr int kRowTile = 16;   // entries

// A piece is K or V of a tile, 16 tokens as they come, each 16 bytes further on than the last would have it: eight
// tokens then have the same columns in different banks, and ldmatrix reads them at once.
template <int kHeadDim>
constexpr int kRowPitch = 2 * kHeadDim + 16;

// Pieces that a warp has on their way or in use: 25 KB.
template <int kHeadDim>
constexpr int kRowPieces = kHeadDim == 256 ? 3 : (kHeadDim == 128 ? 6 : 8);

// Tiles of a chain of a list of `count` entries.
RAGGED_ATTENTION_HOST_DEVICE std::int32_t row_chain(std::int32_t count, std::int32_t chain) {
  const std::int32_t tiles = count / kRowTile + (count % kRowTile != 0 ? 1 : 0);
  return tiles > chain ? (tiles - chain + kRowChains - 1) / kRowChains : 0;
}

// First entry of a tile of a chain.
RAGGED_ATTENTION_HOST_DEVICE std::int64_t row_tile_begin(std::int64_t tile, std::int32_t chain) {
  return (tile * kRowChains + chain) * kRowTile;
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
