// Driver of ragged_flash_attention on the CPU: cuts the rows into tiles and hands them to the pool.
//
// A task is one tile of query positions times one kv head (times a part of its query heads where the group is larger
// than a subtile). A tile is one or more subtiles: how many depends on the work and the threads, and changes no bit.
// Subtiles and blocks of keys are counted from the sequence's first row and their sizes depend on the group and
// head_dim alone, so a sequence's result depends neither on the rest of the batch nor on the threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/cpu/driver.h"
#include "common/cpu_features.h"
#include "common/thread_pool.h"
#include "ragged_flash_attention/cpu/kernel.h"
#include "ragged_flash_attention/params.h"

namespace ragged_attention {

namespace {

// K and V of a block, in float32, take up to 128 KiB: a part of the L2 cache.
std::int32_t block_keys(std::int32_t head_dim) { return head_dim <= 64 ? 256 : head_dim <= 128 ? 128 : 64; }

RaggedTileKernel kernel_for(CpuIsa isa) {
#if defined(RAGGED_ATTENTION_CPU_X86)
  if (isa == CpuIsa::kAvx512) return ragged_tile_avx512;
  if (isa == CpuIsa::kAvx2) return ragged_tile_avx2;
#endif
  (void)isa;
  return ragged_tile_baseline;
}

// Heads of one row with nothing to attend to.
void write_empty(const RaggedParams& params, CpuElement element, std::int64_t row, std::int64_t first_head,
                 std::int64_t num_heads) {
  for (std::int64_t head = first_head; head < first_head + num_heads; ++head) {
    fill_zero(element_address(params.out, row * params.out_row_stride + head * params.out_head_stride, element),
              params.head_dim, element);
    if (params.lse != nullptr) {
      params.lse[row * params.lse_row_stride + head * params.lse_head_stride] = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace

void ragged_flash_attention_cpu(const RaggedParams& params) {
  if (params.rows.total <= 0 || params.num_q_heads <= 0) return;
  const RaggedTileKernel kernel = kernel_for(cpu_isa());
  const CpuElement element = cpu_element(params.dtype);
  const float scale_log2 = static_cast<float>(static_cast<double>(params.scale) * 1.44269504088896340736);

  const std::int64_t group = params.group();
  const std::int64_t heads_per_tile = std::min<std::int64_t>(group, kSubtileRows);
  const std::int64_t parts = (group + heads_per_tile - 1) / heads_per_tile;  // of a group
  const std::int64_t tasks_per_tile = params.num_kv_heads * parts;
  const TileSchedule schedule{params.rows, static_cast<std::int32_t>(kSubtileRows / heads_per_tile)};
  const std::int64_t num_ids = schedule.num_ids();
  // Enough tasks that the threads finish together, though the last ones of a causal sequence are the longest.
  const std::int64_t subtiles_per_tile = std::clamp<std::int64_t>(
      num_ids * tasks_per_tile / (8 * static_cast<std::int64_t>(num_threads())), 1, kMaxSubtiles);
  const std::int64_t tile_positions = subtiles_per_tile * schedule.block_m;

  const std::int32_t block = block_keys(params.head_dim);
  const std::int64_t padded_dim = (params.head_dim + 15) / 16 * 16;
  const std::size_t workspace_bytes =
      sizeof(float) * static_cast<std::size_t>(2 * (subtiles_per_tile * kSubtileRows + block) * padded_dim +
                                               kMaxPassRows * kMaxBlockKeys);

  parallel_for(num_ids * tasks_per_tile, [&](std::int64_t task) {
    // The last tiles of a sequence have the most keys under a causal mask: begin with them.
    const std::int64_t id = num_ids - 1 - task / tasks_per_tile;
    const std::int64_t kv_head = task % tasks_per_tile / parts;
    const std::int64_t part = task % parts;
    const TileSchedule::Tile tile = schedule.tile(id);
    // The id of a tile is that of its first subtile.
    if (tile.row >= tile.length || tile.row % tile_positions != 0) return;
    const std::int64_t num_rows = std::min(tile_positions, tile.length - tile.row);
    const std::int64_t row = tile.begin + tile.row;
    const std::int64_t head = kv_head * group + part * heads_per_tile;
    const std::int64_t num_heads = std::min(heads_per_tile, group - part * heads_per_tile);
    if (!params.rows.owned(tile.segment)) {
      for (std::int64_t r = row; r < row + num_rows; ++r) write_empty(params, element, r, head, num_heads);
      return;
    }

    std::int64_t lo[kMaxSubtiles * kSubtileRows], hi[kMaxSubtiles * kSubtileRows];
    for (std::int64_t r = 0; r < num_rows; ++r) {
      lo[r] = params.mask.lo(tile.row + r, tile.length);
      hi[r] = params.mask.hi(tile.row + r, tile.length);
    }
    thread_local Workspace workspace;
    RaggedTile work{};
    work.q = element_address(params.q.data, row * params.q.row_stride + head * params.q.head_stride, element);
    work.q_row_stride = params.q.row_stride;
    work.q_head_stride = params.q.head_stride;
    work.k = element_address(params.k.data, tile.begin * params.k.row_stride + kv_head * params.k.head_stride, element);
    work.k_row_stride = params.k.row_stride;
    work.v = element_address(params.v.data, tile.begin * params.v.row_stride + kv_head * params.v.head_stride, element);
    work.v_row_stride = params.v.row_stride;
    work.out = element_address(params.out, row * params.out_row_stride + head * params.out_head_stride, element);
    work.out_row_stride = params.out_row_stride;
    work.out_head_stride = params.out_head_stride;
    if (params.lse != nullptr) work.lse = params.lse + row * params.lse_row_stride + head * params.lse_head_stride;
    work.lse_row_stride = params.lse_row_stride;
    work.lse_head_stride = params.lse_head_stride;
    work.num_rows = static_cast<std::int32_t>(num_rows);
    work.subtile_positions = schedule.block_m;
    work.num_heads = static_cast<std::int32_t>(num_heads);
    work.head_dim = params.head_dim;
    work.element = element;
    work.scale_log2 = scale_log2;
    work.lo = lo;
    work.hi = hi;
    work.block_keys = block;
    work.workspace = static_cast<float*>(workspace.reserve(workspace_bytes));
    kernel(work);
  });
}

}  // namespace ragged_attention
