// Row-by-row QSA attention for bfloat16 and float16, sm_80 and later.
//
// Schedule of one CTA: one query row, one kv head, up to 16 of its query heads as the M of m16n8k16.
//   1. Q of the heads to shared memory.
//   2. The warps share out the row's list in tiles of 16 entries, tile t to warp t % warps, each on its own: no barrier
//      until the end. A warp keeps `tiles_in_flight` tiles in a ring in shared memory and, ahead of them in registers,
//      the next tile's addresses and the list entries of the one after: the chain list -> page table -> K and V never
//      stalls. A tile: gather K and V with cp.async (a token's row is 16 bytes a lane), S = Q K^T, drop invalid
//      entries, online softmax, O += P V.
//   3. The warps' partial (maximum, sum, O) meet in shared memory and are merged in warp order.
// Only listed tokens are ever read: an invalid entry, or one past the count, is a zero-filled row with weight 0.
#pragma once

#include "common/cuda/attention.cuh"
#include "common/cuda/launch.h"
#include "qsa_sparse_attention/cuda/config.h"
#include "qsa_sparse_attention/cuda/launch.h"
#include "qsa_sparse_attention/cuda/results.cuh"

namespace ragged_attention::portable {

template <typename Element_, int kHeadDim_>
struct QsaTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kChunks = kHeadDim / kChunk;
  using SharedQ = SwizzledTile<Element, kQsaTileHeads, kHeadDim>;
  using SharedKv = SwizzledTile<Element, kQsaTileKeys, kHeadDim>;
  using WarpMma = WarpsAlongM<Element, 1>;
  static constexpr int kMostThreads = 256;
};

// A lane's view of the list: lane l serves entry l % 16 of a tile.
struct ListReader {
  const std::int32_t* list;
  std::int64_t count;
  std::int64_t sequence;
  std::int64_t length;

  // The entry at this position, -1 (no token) past the count.
  __device__ __forceinline__ std::int32_t entry(std::int64_t position) const {
    return position < count ? list[position] : -1;
  }
};

__device__ __forceinline__ void wait_for_all_but(int pending) {
  // cp.async.wait_group takes an immediate.
  switch (pending) {
    case 0:
      cute::cp_async_wait<0>();
      break;
    case 1:
      cute::cp_async_wait<1>();
      break;
    case 2:
      cute::cp_async_wait<2>();
      break;
    case 3:
      cute::cp_async_wait<3>();
      break;
    default:
      cute::cp_async_wait<4>();
      break;
  }
}

// K and V rows of 16 tokens into one ring slot. `offset` is the lane's token's element offset, or kNotListed; lane i
// holds token i % 16.
template <typename Traits>
__device__ __forceinline__ void gather(typename Traits::Element* slot_k, typename Traits::Element* slot_v,
                                       const PagedCache& cache, std::int64_t head_offset, std::int64_t offset,
                                       int head_dim, bool aligned) {
  using Element = typename Traits::Element;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const typename Traits::SharedKv::Layout layout{};
  const auto* k = static_cast<const Element*>(cache.k) + head_offset;
  const auto* v = static_cast<const Element*>(cache.v) + head_offset;
  const auto copy = [&](int i) {
    const int index = i * 32 + lane;
    const int token = index / Traits::kChunks, column = index % Traits::kChunks * kChunk;
    const std::int64_t token_at = __shfl_sync(0xffffffffu, offset, token);
    const bool valid = token_at != kNotListed && column < head_dim;
    const std::int64_t from = valid ? token_at + column : 0;
    const int to = layout(token, column);
    copy_chunk(slot_k + to, k + from, valid, aligned);
    copy_chunk(slot_v + to, v + from, valid, aligned);
  };
  constexpr int kCopies = kQsaTileKeys * Traits::kChunks / 32;
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) copy(i);
  } else {
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) copy(i);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kMostThreads)
    qsa_kernel(const __grid_constant__ QsaKernelParams kernel_params) {
  using namespace cute;
  using Element = typename Traits::Element;
  constexpr int kHeadDim = Traits::kHeadDim;
  const QsaParams& params = kernel_params.params;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int in_flight = kernel_params.tiles_in_flight;
  const int group = params.group();
  const int head_tiles = (group + kQsaTileHeads - 1) / kQsaTileHeads;

  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Element* shared_q = reinterpret_cast<Element*>(shared_bytes);
  Element* rings = shared_q + Int<Traits::SharedQ::kElements>{};
  constexpr int kTile = Traits::SharedKv::kElements;  // K or V of one ring slot
  Element* ring = rings + warp * in_flight * 2 * kTile;

  typename Traits::WarpMma mma;
  auto thread_mma = mma.get_thread_slice(lane);
  auto copy_q = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
  auto copy_k = make_tiled_copy_B(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
  auto copy_v = make_tiled_copy_B(Copy_Atom<SM75_U16x8_LDSM_T, Element>{}, mma);
  auto thread_copy_q = copy_q.get_thread_slice(lane);
  auto thread_copy_k = copy_k.get_thread_slice(lane);
  auto thread_copy_v = copy_v.get_thread_slice(lane);
  auto s_q = make_tensor(make_smem_ptr(shared_q), typename Traits::SharedQ::Layout{});
  auto r_q = thread_mma.partition_fragment_A(s_q);
  const auto from_q = thread_copy_q.partition_S(s_q);

  const std::int64_t work = params.rows.total * params.num_kv_heads * head_tiles;
  for (std::int64_t item = blockIdx.x; item < work; item += gridDim.x) {
    // The kv heads of a row are neighbours: their K rows lie side by side in memory.
    const int head_tile = static_cast<int>(item % head_tiles);
    const int kv_head = static_cast<int>(item / head_tiles % params.num_kv_heads);
    const std::int64_t row = item / head_tiles / params.num_kv_heads;
    const int first_head = kv_head * group + head_tile * kQsaTileHeads;
    const int heads = min(kQsaTileHeads, group - head_tile * kQsaTileHeads);

    const QsaParams::RowSource source = params.source(row);
    const ListReader reader{params.token_indices + row * params.token_indices_row_stride,
                            source.sequence < 0 ? 0 : params.count(row), source.sequence, source.length};
    const int tiles = static_cast<int>((reader.count + kQsaTileKeys - 1) / kQsaTileKeys);
    const std::int64_t head_offset = kv_head * params.cache.head_stride;
    const auto position = [&](int tile) { return std::int64_t{tile} * kQsaTileKeys + lane % kQsaTileKeys; };
    const auto offset_of = [&](std::int32_t token) {
      return token < 0 ? kNotListed : token_offset(params.cache, reader.sequence, token, reader.length);
    };

    __syncthreads();  // the last row's merge has left shared memory
    for (int index = thread; index < kQsaTileHeads * Traits::kChunks; index += static_cast<int>(blockDim.x)) {
      const int head = index / Traits::kChunks, column = index % Traits::kChunks * kChunk;
      const bool valid = head < heads && column < params.head_dim;
      const auto* q = static_cast<const Element*>(params.q) + row * params.q_row_stride;
      copy_chunk(&s_q(head, column), q + (valid ? (first_head + head) * params.q_head_stride + column : 0), valid,
                 kernel_params.q_aligned);
    }
    cp_async_fence();

    // Fill the ring: tile n of this warp is tile warp + n * warps of the list. `valid_tokens` keeps, for each slot,
    // which of its 16 entries are real; slot s in bits 16 (s % 2) of word s / 2.
    std::uint32_t valid_tokens[2] = {0, 0};
    const auto mark = [&](int slot, std::int64_t offset) {
      const std::uint32_t valid = __ballot_sync(0xffffffffu, offset != kNotListed) & 0xffffu;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (slot == i)
          valid_tokens[i / 2] = (valid_tokens[i / 2] & (0xffff0000u >> (16 * (i % 2)))) | valid << (16 * (i % 2));
      }
    };
    int next = warp;  // the list's tile to gather next
    for (int slot = 0; slot < in_flight; ++slot, next += warps) {
      if (next < tiles) {
        const std::int64_t offset = offset_of(reader.entry(position(next)));
        mark(slot, offset);
        gather<Traits>(ring + slot * 2 * kTile, ring + slot * 2 * kTile + kTile, params.cache, head_offset, offset,
                       params.head_dim, kernel_params.kv_aligned);
      }
      cp_async_fence();
    }
    std::int64_t next_offset = offset_of(reader.entry(position(next)));
    std::int32_t after_next = reader.entry(position(next + warps));
    wait_for_all_but(in_flight);
    __syncthreads();  // Q, the oldest copy, is here for every warp

    auto acc_o = partition_fragment_C(mma, Shape<Int<kQsaTileHeads>, Int<kHeadDim>>{});
    clear(acc_o);
    auto o = make_tensor(acc_o.data(), rows_and_columns(acc_o.layout()));
    constexpr int kThreadRows = decltype(size<0>(o))::value;
    static_assert(kThreadRows == 2);
    OnlineSoftmax<kThreadRows> softmax;
    const float scale = params.scale * kLog2E;

    int slot = 0;
    for (int tile = warp; tile < tiles; tile += warps) {
      wait_for_all_but(in_flight - 1);
      __syncwarp();
      auto s_k = make_tensor(make_smem_ptr(ring + slot * 2 * kTile), typename Traits::SharedKv::Layout{});
      auto s_vt =
          make_tensor(make_smem_ptr(ring + slot * 2 * kTile + kTile), typename Traits::SharedKv::TransposedLayout{});
      auto s_vt_plain = make_tensor(s_vt.data(), get_nonswizzle_portion(typename Traits::SharedKv::TransposedLayout{}));
      auto r_k = thread_mma.partition_fragment_B(s_k);
      auto r_v = thread_mma.partition_fragment_B(s_vt_plain);

      auto acc_s = partition_fragment_C(mma, Shape<Int<kQsaTileHeads>, Int<kQsaTileKeys>>{});
      clear(acc_s);
      gemm_shared(acc_s, r_q, r_k, from_q, thread_copy_k.partition_S(s_k), mma, copy_q, copy_k, thread_copy_q,
                  thread_copy_k);

      auto scores = make_tensor(acc_s.data(), rows_and_columns(acc_s.layout()));
      const std::uint32_t valid = (slot < 2 ? valid_tokens[0] : valid_tokens[1]) >> (16 * (slot % 2));
#pragma unroll
      for (int c = 0; c < 4; ++c) {  // this lane's columns: 8 n + 2 (lane % 4) + {0, 1}
        const int key = 8 * (c / 2) + 2 * (lane % 4) + c % 2;
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) scores(r, c) = valid >> key & 1 ? scores(r, c) * scale : -INFINITY;
      }
      softmax.update(scores, o);
      const auto p = converted<Element>(acc_s);
      const auto r_p = make_tensor(p.data(), as_a_operand(p.layout()));
      gemm_registers(acc_o, r_p, r_v, thread_copy_v.partition_S(s_vt), mma, copy_v, thread_copy_v);

      __syncwarp();  // every lane has read the slot
      if (next < tiles) {
        mark(slot, next_offset);
        gather<Traits>(ring + slot * 2 * kTile, ring + slot * 2 * kTile + kTile, params.cache, head_offset, next_offset,
                       params.head_dim, kernel_params.kv_aligned);
      }
      cp_async_fence();
      next += warps;
      next_offset = offset_of(after_next);
      after_next = reader.entry(position(next + warps));
      slot = slot + 1 == in_flight ? 0 : slot + 1;
    }
    cp_async_wait<0>();
    softmax.finish();

    // Merge: [warp][head] maximum and sum, then [warp][head][head_dim] of O, in the rings' place.
    __syncthreads();
    WarpPartials partials;
    partials.maxima = reinterpret_cast<float*>(rings);
    partials.sums = partials.maxima + warps * kQsaTileHeads;
    partials.outputs = partials.sums + warps * kQsaTileHeads;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const int head = lane / 4 + 8 * r;
      if (lane % 4 == 0) {
        partials.maxima[warp * kQsaTileHeads + head] = softmax.maximum[r];
        partials.sums[warp * kQsaTileHeads + head] = softmax.sum[r];
      }
      float* to = partials.outputs + (warp * kQsaTileHeads + head) * kHeadDim + 2 * (lane % 4);
#pragma unroll
      for (int c = 0; c < decltype(size<1>(o))::value; c += 2) {
        *reinterpret_cast<float2*>(to + 4 * c) = make_float2(o(r, c), o(r, c + 1));
      }
    }
    __syncthreads();
    merge_and_store<kQsaTileHeads, kHeadDim>(kernel_params, partials, warps, row, first_head, heads);
  }
}

template <typename Element, int kHeadDim>
void launch_qsa(const QsaKernelParams& params, QsaLaunchShape shape, int device, StreamHandle stream) {
  const std::int64_t head_tiles = (params.params.group() + kQsaTileHeads - 1) / kQsaTileHeads;
  launch<qsa_kernel<QsaTraits<Element, kHeadDim>>>(
      params, params.params.rows.total * params.params.num_kv_heads * head_tiles, shape.warps * 32,
      qsa_shared_bytes(kHeadDim, shape.warps, shape.unroll), device, static_cast<cudaStream_t>(stream),
      "launching qsa_sparse_attention");
}

}  // namespace ragged_attention::portable
