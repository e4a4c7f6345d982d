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
  int stages;     // of K and of V
  int q_stages;
  int ctas;       // on a multiprocessor
  bool turns;     // warpgroups take turns at the tensor cores
  int unit_heads = 1;  // most query heads that a CTA takes at once
};

template <int kHeadDim, MaskClass kMaskClass>
struct LongTile;

template <MaskClass kMaskClass>
struct LongTile<64, kMaskClass> {
  static constexpr TileShape kShape = {3, 128, 2, 1, 1, true};
};
template <MaskClass kMaskClass>
struct LongTile<80, kMaskClass> {
  static constexpr TileShape kShape = {3, 112, 2, 1, 1, true};
};
template <MaskClass kMaskClass>
struct LongTile<96, kMaskClass> {
  static constexpr TileShape kShape = {3, 112, 2, 1, 1, true};
};
template <>
struct LongTile<128, MaskClass::kFull> {
  static constexpr TileShape kShape = {2, 176, 2, 1, 1, true};
};
template <>
struct LongTile<128, MaskClass::kEdged> {
  static constexpr TileShape kShape = {2, 128, 2, 1, 1, true};
};
template <MaskClass kMaskClass>
struct LongTile<192, kMaskClass> {
  static constexpr TileShape kShape = {2, 112, 2, 1, 1, false};
};
template <MaskClass kMaskClass>
struct LongTile<256, kMaskClass> {
  static constexpr TileShape kShape = {2, 80, 2, 1, 1, false};
};

template <int kHeadDim>
struct ShortTile;

template <>
struct ShortTile<64> {
  static constexpr TileShape kShape = {1, 64, 3, 2, 3, false, 8};  // 64 KB
};
template <>
struct ShortTile<80> {
  static constexpr TileShape kShape = {1, 64, 2, 2, 2, false, 8};  // 96 KB
};
template <>
struct ShortTile<96> {
  static constexpr TileShape kShape = {1, 64, 2, 2, 2, false, 8};  // 96 KB
};
template <>
struct ShortTile<128> {
  static constexpr TileShape kShape = {1, 64, 2, 2, 2, false, 8};  // 96 KB
};
template <>
struct ShortTile<192> {
  static constexpr TileShape kShape = {2, 64, 2, 1, 1, false, 8};  // 144 KB
};
template <>
struct ShortTile<256> {
  static constexpr TileShape kShape = {2, 64, 2, 1, 1, false, 8};  // 192 KB
};

// The most rows of a sequence that the short kernel takes.
constexpr int kShortRows = 512;

}  // namespace ragged_attention::sm90
