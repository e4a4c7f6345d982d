// The Hopper kernels of ragged_flash_attention: their tiles, and which sequences each takes. Host code reads it too.
//
// Two kernels share a call. The long one keeps a multiprocessor to itself: two or three warpgroups of 64 rows share each
// tile of keys. The short one puts several CTAs of one warpgroup on a multiprocessor, so that one's loads and stores run
// under another's arithmetic. Which kernel computes a sequence depends on its own length, the head dim and the mask's
// class, never on the batch: so do its bits.
#pragma once

#include <cstdint>

namespace ragged_attention::sm90 {

// Masks under which most tiles of keys are whole, and the rest.
enum class MaskClass : std::int32_t { kFull, kEdged };

// Shared memory: (block_m * q_stages + 2 * stages * block_n) * (head dim up to the next multiple of 64) * 2 bytes, and
// 227 KB at most a multiprocessor. Registers a thread: block_n / 2 for S, block_n / 4 for P, head_dim / 2 for O and
// about 30 more, of 240 with two warpgroups and of 160 with three.
struct TileShape {
  int consumers;  // warpgroups of 64 query rows
  int block_n;    // keys
  int q_stages, k_stages, v_stages;
  int ctas;       // on a multiprocessor
  bool overlap;   // softmax of a tile under the product P V of the one before, in the same warpgroup
  bool turns;     // warpgroups take turns at the tensor cores
  int unit_heads;  // most query heads that a CTA takes at once
};

template <int kHeadDim, MaskClass kMaskClass>
struct LongTile;

#ifndef LONG64
#define LONG64 {3, 128, 2, 2, 2, 1, true, true, 1}
#endif
#ifndef LONG80
#define LONG80 {3, 112, 2, 2, 2, 1, true, true, 1}
#endif
#ifndef LONG128F
#define LONG128F {2, 160, 2, 2, 2, 1, true, true, 1}
#endif
#ifndef LONG128
#define LONG128 {2, 128, 2, 2, 2, 1, true, true, 1}
#endif
#ifndef LONG192
#define LONG192 {2, 112, 1, 2, 2, 1, true, false, 1}
#endif
#ifndef LONG256
#define LONG256 {2, 80, 1, 2, 2, 1, true, false, 1}
#endif
template <MaskClass kMaskClass>
struct LongTile<64, kMaskClass> {
  static constexpr TileShape kShape = LONG64;
};
template <MaskClass kMaskClass>
struct LongTile<80, kMaskClass> {
  static constexpr TileShape kShape = LONG80;
};
template <MaskClass kMaskClass>
struct LongTile<96, kMaskClass> {
  static constexpr TileShape kShape = LONG80;
};
template <>
struct LongTile<128, MaskClass::kFull> {
  static constexpr TileShape kShape = LONG128F;
};
template <>
struct LongTile<128, MaskClass::kEdged> {
  static constexpr TileShape kShape = LONG128;
};
template <MaskClass kMaskClass>
struct LongTile<192, kMaskClass> {
  static constexpr TileShape kShape = LONG192;
};
template <MaskClass kMaskClass>
struct LongTile<256, kMaskClass> {
  static constexpr TileShape kShape = LONG256;
};

template <int kHeadDim>
struct ShortTile;

#ifndef SHORT64
#define SHORT64 {1, 128, 2, 2, 2, 2, true, false, 8}
#endif
#ifndef SHORT80
#define SHORT80 {1, 64, 2, 2, 2, 2, true, false, 8}
#endif
#ifndef SHORT128
#define SHORT128 {1, 64, 2, 2, 2, 2, true, false, 8}
#endif
#ifndef SHORT256
#define SHORT256 {2, 64, 1, 2, 2, 1, true, false, 8}
#endif
template <>
struct ShortTile<64> {
  static constexpr TileShape kShape = SHORT64;
};
template <>
struct ShortTile<80> {
  static constexpr TileShape kShape = SHORT80;
};
template <>
struct ShortTile<96> {
  static constexpr TileShape kShape = SHORT80;
};
template <>
struct ShortTile<128> {
  static constexpr TileShape kShape = SHORT128;
};
template <>
struct ShortTile<192> {
  static constexpr TileShape kShape = SHORT256;
};
template <>
struct ShortTile<256> {
  static constexpr TileShape kShape = SHORT256;
};

// The most rows of a sequence that the short kernel takes.
#ifndef SHORTROWS
#define SHORTROWS 512
#endif
constexpr int kShortRows = SHORTROWS;

}  // namespace ragged_attention::sm90
