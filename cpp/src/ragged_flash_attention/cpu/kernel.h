// One tile of ragged_flash_attention on the CPU: what the driver gives a kernel, and the kernels there are.
//
// Plain data only: this header is compiled with every set of instruction-set flags.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/cpu/element.h"

namespace ragged_attention {

// Query rows times heads of a tile: 24 strips of 6 rows, 12 of 12, 18 of 8. Large enough to hide the packing of K and V
// (about 5 % at 144 rows), small enough that the tile's Q, O and one block of K and V stay in a 512 KiB L2 cache.
constexpr int kMaxTileRows = 144;
constexpr int kMaxBlockKeys = 256;
constexpr int kMaxPassRows = 24;

struct RaggedTile {
  const void* q;  // the tile's first row and first head; strides in elements here and below
  int64_t q_row_stride;
  int64_t q_head_stride;
  const void* k;  // the sequence's first row, the tile's kv head
  int64_t k_row_stride;
  const void* v;
  int64_t v_row_stride;
  void* out;  // the tile's first row and first head
  int64_t out_row_stride;
  int64_t out_head_stride;
  float* lse;  // null when not wanted
  int64_t lse_row_stride;
  int64_t lse_head_stride;

  int32_t num_rows;   // query positions; num_rows * num_heads <= kMaxTileRows
  int32_t num_heads;  // query heads that share the kv head
  int32_t head_dim;
  CpuElement element;
  float scale_log2;  // scale * log2(e)

  const int64_t* lo;  // [num_rows]: each position sees the keys [lo, hi), both monotone, 0 <= lo <= hi <= rows of k
  const int64_t* hi;

  int32_t block_keys;  // keys packed at a time: a multiple of 64, at most kMaxBlockKeys
  float* workspace;    // 64-byte aligned: 2 * (kMaxTileRows + block_keys) * dim + kMaxPassRows * kMaxBlockKeys floats,
                       // where dim is head_dim rounded up to a multiple of 16
};

using RaggedTileKernel = void (*)(const RaggedTile& tile);

void ragged_tile_baseline(const RaggedTile& tile);
#if defined(RAGGED_ATTENTION_CPU_X86)
void ragged_tile_avx2(const RaggedTile& tile);
void ragged_tile_avx512(const RaggedTile& tile);
#endif

}  // namespace ragged_attention
