// The Hopper kernels of ragged_flash_attention: their tiles, and which sequences each takes. Host code reads it too.
//
// Two kernels share a call. The long one keeps a multiprocessor to itself: two or three warpgroups of 64 rows share each
// tile of keys. The short one loses less at both ends of a sequence: up to D 128, two CTAs of one warpgroup on a
// multiprocessor, one's loads and stores under the other's arithmetic; above, a second stage for Q in the place of longer
// tiles of keys. Which kernel computes a sequence depends on its own length and the head dim, never on the batch: so do
// its bits.
#pragma once

namespace ragged_attention::sm90 {

// Shared memory: (64 consumers q_stages + block_n (k_stages + v_stages)) rows of the head dim, up to the next multiple of
// 64, times 2 bytes; 227 KB a multiprocessor. Registers a thread: block_n / 2 for S, block_n / 4 for P, head_dim / 2 for
// O and about 30 more, of 168 with one warpgroup, 224 with two and 160 with three.
struct TileShape {
  int consumers;  // warpgroups of 64 query rows
  int block_n;    // keys
  int q_stages, k_stages, v_stages;
  int ctas;        // on a multiprocessor
  bool turns;      // warpgroups take turns at the tensor cores
  int unit_heads;  // most query heads that a CTA takes at once
};

template <int kHeadDim>
struct Tiles;

#ifndef T64
#define T64 {3, 112, 2, 2, 2, 1, true, 1}
#define S64 {1, 64, 2, 4, 4, 2, false, 8}
#define N64 256
#endif
#ifndef T80
#define T80 {3, 112, 2, 2, 2, 1, true, 1}
#define S80 {1, 64, 2, 2, 2, 2, false, 8}
#define N80 256
#endif
#ifndef T96
#define T96 {3, 96, 2, 2, 2, 1, true, 1}
#endif
#ifndef T128
#define T128 {2, 128, 2, 2, 2, 1, true, 1}
#define S128 {1, 64, 2, 2, 2, 2, false, 8}
#define N128 256
#endif
#ifndef T192
#define T192 {2, 112, 1, 2, 2, 1, false, 1}
#define S192 {2, 64, 2, 2, 2, 1, false, 8}
#define N192 1024
#endif
#ifndef T256
#define T256 {2, 80, 1, 2, 2, 1, false, 1}
#define S256 {2, 64, 2, 2, 1, 1, false, 8}
#define N256 1024
#endif

template <>
struct Tiles<64> {
  static constexpr TileShape kLong = T64;
  static constexpr TileShape kShort = S64;
  static constexpr int kShortRows = N64;  // the most rows of a sequence that the short kernel takes
};
template <>
struct Tiles<80> {  // 72 too
  static constexpr TileShape kLong = T80;
  static constexpr TileShape kShort = S80;
  static constexpr int kShortRows = N80;
};
template <>
struct Tiles<96> {
  static constexpr TileShape kLong = T96;
  static constexpr TileShape kShort = S80;
  static constexpr int kShortRows = N80;
};
template <>
struct Tiles<128> {
  static constexpr TileShape kLong = T128;
  static constexpr TileShape kShort = S128;
  static constexpr int kShortRows = N128;
};
template <>
struct Tiles<192> {
  static constexpr TileShape kLong = T192;
  static constexpr TileShape kShort = S192;
  static constexpr int kShortRows = N192;
};
template <>
struct Tiles<256> {
  static constexpr TileShape kLong = T256;
  static constexpr TileShape kShort = S256;
  static constexpr int kShortRows = N256;
};

}  // namespace ragged_attention::sm90
