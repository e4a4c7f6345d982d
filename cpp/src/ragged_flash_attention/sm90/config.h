// The Hopper kernels of ragged_flash_attention: their tiles, and which sequences each takes. Host code reads it too.
//
// Two kernels share a call. The long one keeps a multiprocessor to itself: two or three warpgroups of 64 rows share
// each tile of keys. The short one loses less at both ends of a sequence: up to D 128, two or three CTAs of one
// warpgroup on a multiprocessor, one's loads and stores under the others' arithmetic, and Q two tiles ahead; above, a
// second stage for Q in the place of longer tiles of keys. Which kernel computes a sequence depends on its own length,
// the head dim and the mask, never on the batch: so do its bits.
#pragma once

#include <cstdint>

namespace ragged_attention::sm90 {

// Shared memory: (64 consumers q_stages + block_n (k_stages + v_stages)) rows of the head dim, up to the next multiple
// of 64, times 2 bytes; 227 KB a multiprocessor. Registers a thread: block_n / 2 for S, block_n / 4 for P, head_dim / 2
// for O and about 30 more, of 168 in two CTAs of one warpgroup, 120 in three CTAs, 232 with two warpgroups and 152 with
// three.
struct TileShape {
  int consumers;  // warpgroups of 64 query rows
  int block_n;    // keys
  int q_stages, k_stages, v_stages;
  int ctas;        // on a multiprocessor
  bool turns;      // warpgroups take turns at the tensor cores
  int unit_heads;  // most query heads that a CTA takes at once
};

// The long kernel takes several heads at once only where sequences are probably no longer than this: their tiles share
// a ticket and a search. 11 % faster at D 128 for sequences of 16 to 511 rows, causal; at 1024 rows 4 % slower.
constexpr std::int64_t kAlikeRows = 512;

// Registers a thread where setmaxnreg moves them from the producers to the consumers.
struct Registers {
  int producer, consumer;
};
constexpr Registers registers(const TileShape& shape) {
  if (shape.ctas > 2) return {40, 120};                                   // of 80
  return shape.consumers == 3 ? Registers{56, 152} : Registers{40, 232};  // of 128 and 168
}

constexpr std::int32_t kAnyLength = 0x7fffffff;

template <int kHeadDim>
struct Tiles;

template <>
struct Tiles<64> {
  // Three warpgroups: O is small, and the exponentials of one take as long as its products, so two others run
  // meanwhile.
  static constexpr TileShape kLong = {3, 112, 2, 2, 2, 1, true, 8};  // 104 KB
  // O is small enough for three CTAs: 10 % faster under a window of 128 tokens.
  static constexpr TileShape kShort = {1, 64, 3, 2, 2, 3, false, 8};  // 56 KB
  // The most rows of a sequence that the short kernel takes. Under a causal mask its tiles of 64 rows compute less that
  // is not needed: 32 x 512 is 8 % faster than by the long kernel, 16 x 1024 4 %, 8 x 2048 slower. Without a mask,
  // 32 x 512 is 3 % slower.
  static constexpr int kShortRows = 256, kShortCausalRows = 1024;
};
template <>
struct Tiles<80> {  // 72 too: the columns from 72 on arrive as zeros and are not stored
  static constexpr TileShape kLong = {3, 112, 2, 2, 2, 1, true, 8};  // 208 KB
  // Three stages for Q: at D 128, 2 to 3 % faster than two at 40 to 128 rows. D 80 and 96 are taken to be alike.
  static constexpr TileShape kShort = {1, 64, 3, 2, 2, 2, false, 8};  // 112 KB
  static constexpr int kShortRows = 256, kShortCausalRows = 256;
};
template <>
struct Tiles<96> {
  // 112 keys would not fit the registers.
  static constexpr TileShape kLong = {3, 96, 2, 2, 2, 1, true, 8};    // 192 KB
  static constexpr TileShape kShort = {1, 64, 3, 2, 2, 2, false, 8};  // 112 KB
  static constexpr int kShortRows = 256, kShortCausalRows = 256;
};
template <>
struct Tiles<128> {
  // 160 keys: as fast at 16384 tokens, slower at 512, where a quarter of the last tile is empty.
  static constexpr TileShape kLong = {2, 128, 2, 2, 2, 1, true, 8};   // 192 KB
  static constexpr TileShape kShort = {1, 64, 3, 2, 2, 2, false, 8};  // 112 KB
  static constexpr int kShortRows = 256, kShortCausalRows = 256;
};
template <>
struct Tiles<192> {
  static constexpr TileShape kLong = {2, 112, 1, 2, 2, 1, false, 1};  // 216 KB
  static constexpr TileShape kShort = {2, 64, 2, 2, 2, 1, false, 8};  // 192 KB
  static constexpr int kShortRows = 1024, kShortCausalRows = 1024;
};
template <>
struct Tiles<256> {
  // kLong is 8 to 18 % faster than kShort from 4096 rows on, kShort 15 % faster at 512. Turns make no difference.
  static constexpr TileShape kLong = {2, 80, 1, 2, 2, 1, false, 1};   // 224 KB
  static constexpr TileShape kShort = {2, 64, 2, 2, 1, 1, false, 8};  // 224 KB
  static constexpr int kShortRows = 1024, kShortCausalRows = 1024;
};

}  // namespace ragged_attention::sm90
