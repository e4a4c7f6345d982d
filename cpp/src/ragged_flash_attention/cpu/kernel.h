// One tile of ragged_flash_attention on the CPU: what the driver gives a kernel, and the kernels there are.
//
// Plain data only: this header is compiled with every set of instruction-set flags.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/cpu/element.h"

namespace ragged_attention {

// Query positions times heads of a subtile: 24 strips of 6 rows, 12 of 12. Rows are grouped into strips within a
// subtile only, so that no result depends on how many subtiles a tile has.
constexpr int kSubtileRows = 144;
// More subtiles share the packing of K and V (a third of the time with one subtile, when the heads of a token lie
// together and every key is on another page); fewer make more tasks.
constexpr int kMaxSubtiles = 8;
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

  int32_t num_rows;           // query positions, at most kMaxSubtiles * subtile_positions
  int32_t subtile_positions;  // query positions per subtile; times num_heads at most kSubtileRows
  int32_t num_heads;          // query heads that share the kv head
  int32_t head_dim;
  CpuElement element;
  float scale_log2;  // scale * log2(e)

  const int64_t* lo;  // [num_rows]: each position sees the keys [lo, hi), both monotone, 0 <= lo <= hi <= rows of k
  const int64_t* hi;

  int32_t block_keys;  // keys packed at a time: a multiple of 64, at most kMaxBlockKeys
  float* workspace;  // 64-byte aligned: 2 * (subtiles * kSubtileRows + block_keys) * dim + kMaxPassRows * kMaxBlockKeys
                     // floats, where dim is head_dim rounded up to a multiple of 16
};

using RaggedTileKernel = void (*)(const RaggedTile& tile);

void ragged_tile_baseline(const RaggedTile& tile);
#if defined(RAGGED_ATTENTION_CPU_X86)
void ragged_tile_avx2(const RaggedTile& tile);
void ragged_tile_avx512(const RaggedTile& tile);
#endif

}  // namespace ragged_attention
