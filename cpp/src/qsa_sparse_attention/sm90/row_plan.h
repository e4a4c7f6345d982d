// How a single row's list is dealt out: to tiles, chains of tiles, rounds and CTAs; and how what a round gathers lies in
// shared memory. Host+device arithmetic.
//
// Tile t holds entries [16 t, 16 t + 16) of the list. Warp w takes the tiles t = w mod 8, its chain, in their order, and
// keeps a softmax of its own; the chains are merged in the order of warps. A cluster shares each chain out again: warp w
// of CTA c computes the scores of every kCtas-th tile of chain w, all CTAs exchange them, and each CTA sums kHeadDim /
// kCtas columns of the values of all tiles. So the order of every sum is the same for any number of CTAs, and so is
// every bit.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace ragged_attention::sm90 {

constexpr int kRowWarps = 8;
constexpr int kRowTile = 16;  // entries

// What a warp keeps on its way, in pieces of kRowTile * kHeadDim elements: K of a round (one tile) or V of a round
// (kCtas tiles, kHeadDim / kCtas columns). With the scores that it is sent, 1 KB a tile, 26 KB a warp at most.
template <int kHeadDim, int kCtas>
struct RowStages;
template <>
struct RowStages<256, 1> {
  static constexpr int kK = 2, kV = 1;
};
template <>
struct RowStages<256, 2> {
  static constexpr int kK = 2, kV = 1;
};
template <>
struct RowStages<256, 4> {
  static constexpr int kK = 1, kV = 1;
};
template <>
struct RowStages<256, 8> {
  static constexpr int kK = 1, kV = 1;
};
template <int kCtas>
struct RowStages<128, kCtas> {
  static constexpr int kK = kCtas < 4 ? 3 : 2, kV = kCtas == 1 ? 3 : 2;
};
template <int kCtas>
struct RowStages<64, kCtas> {
  static constexpr int kK = 4, kV = 4;
};

// Tiles of chain `warp` of a list of `count` entries.
RAGGED_ATTENTION_HOST_DEVICE std::int32_t row_chain(std::int32_t count, std::int32_t warp) {
  const std::int32_t tiles = (count + kRowTile - 1) / kRowTile;
  return tiles > warp ? (tiles - warp + kRowWarps - 1) / kRowWarps : 0;
}

// First entry of a tile of a chain.
RAGGED_ATTENTION_HOST_DEVICE std::int64_t row_tile_begin(std::int64_t tile, std::int32_t warp) {
  return (tile * kRowWarps + warp) * kRowTile;
}

// CTAs that share a row, where `rows` of them want to be done at once on a GPU of `multiprocessors`.
RAGGED_ATTENTION_HOST_DEVICE int row_ctas(std::int64_t rows, int multiprocessors) {
  int ctas = 8;
  while (ctas > 1 && rows * ctas > multiprocessors) ctas /= 2;
  return ctas;
}

// Byte offset of a 16-byte chunk in a piece of rows of kChunks chunks: 8 neighbouring rows have the same chunk on 8
// different 16 bytes of the 128 that shared memory reads at once.
template <int kChunks>
RAGGED_ATTENTION_HOST_DEVICE std::uint32_t piece_offset(int row, int chunk) {
  static_assert((kChunks & (kChunks - 1)) == 0);
  const int swap = kChunks >= 8 ? row % 8 : row / (8 / kChunks) % kChunks;
  return static_cast<std::uint32_t>((row * kChunks + (chunk ^ swap)) * 16);
}

}  // namespace ragged_attention::sm90
