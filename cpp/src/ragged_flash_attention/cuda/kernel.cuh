// Portable ragged flash attention for bfloat16 and float16, sm_80 and later.
//
// Schedule of one CTA: kBlockM query rows of one sequence and one query head, four warps along M.
//   1. Find the tile: a binary search over the offsets on the device, so that no host or prepare kernel reads them.
//   2. cp.async Q and the first K tile.
//   3. For each K tile in the interval of keys that any row of the tile sees:
//        wait for K; start V of this tile; S = Q K^T; wait for V; start the next K; mask if an edge crosses the tile;
//        online softmax; O += P V, P staying in registers.
//      One buffer each for K and V: K loads under softmax and P V, V under Q K^T.
//   4. O / sum through shared memory (in Q's place), 16 bytes a store; LSE beside it.
// Rows past the sequence's end are zeros in shared memory, so nothing of another sequence is ever multiplied.
// A sequence's tiles start at its own first row and its keys at the tile's own first visible key: bits depend on the
// sequence alone.
#pragma once

#include "common/cuda/attention.cuh"
#include "common/cuda/launch.h"
#include "ragged_flash_attention/cuda/config.h"
#include "ragged_flash_attention/cuda/launch.h"

namespace ragged_attention::portable {

template <typename Element_, int kHeadDim_>
struct RaggedTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  using Tile = RaggedTile<kHeadDim>;
  static constexpr int kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kThreads = Tile::kWarps * 32;
  using SharedQ = SwizzledTile<Element, kBlockM, kHeadDim>;
  using SharedKv = SwizzledTile<Element, kBlockN, kHeadDim>;
  using TiledMma = WarpsAlongM<Element, Tile::kWarps>;
  static constexpr int kSharedBytes =
      (SharedQ::kElements + 2 * SharedKv::kElements) * static_cast<int>(sizeof(Element));
};

// kRows x head_dim of a tensor whose row 0 is `base` into shared memory; rows from `rows` on and columns from head_dim
// on are zeros. The threads cover one swizzle atom's columns and kPassRows rows at a time, a multiple of the atom's 8
// rows: then a thread's addresses differ by constants in shared memory and by one step in global memory, and nothing is
// worth the compiler's keeping in registers across the main loop.
template <typename Traits, typename Shared>
__device__ __forceinline__ void load_rows(typename Traits::Element* shared, const typename Traits::Element* base,
                                          std::int64_t row_stride, int rows, int head_dim, bool aligned) {
  constexpr int kAtomWidth = Shared::kAtomWidth;
  constexpr int kAtomChunks = kAtomWidth / kChunk;
  constexpr int kPassRows = Traits::kThreads / kAtomChunks;
  constexpr int kRows = Shared::kElements / Traits::kHeadDim;
  static_assert(kPassRows % 8 == 0 && kRows % kPassRows == 0);
  const int row = static_cast<int>(threadIdx.x) / kAtomChunks;
  const int column = static_cast<int>(threadIdx.x) % kAtomChunks * kChunk;
  typename Traits::Element* to = shared + typename Shared::Layout{}(row, column);
  const typename Traits::Element* from = base + row * row_stride + column;
  const auto pass = [&](int i) {
#pragma unroll
    for (int atom = 0; atom < Traits::kHeadDim / kAtomWidth; ++atom) {
      const bool valid = row + i * kPassRows < rows && column + atom * kAtomWidth < head_dim;
      copy_chunk(to + i * kPassRows * kAtomWidth + atom * kRows * kAtomWidth, from + atom * kAtomWidth, valid, aligned);
    }
    from += kPassRows * row_stride;
  };
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kRows / kPassRows; ++i) pass(i);
  } else {
#pragma unroll 1
    for (int i = 0; i < kRows / kPassRows; ++i) pass(i);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    ragged_kernel(const __grid_constant__ RaggedKernelParams kernel_params) {
  using namespace cute;
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  const RaggedParams& params = kernel_params.params;
  const RaggedAlignment aligned = kernel_params.aligned;
  const int thread = static_cast<int>(threadIdx.x);
  const int head_dim = params.head_dim;

  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Element* shared_q = reinterpret_cast<Element*>(shared_bytes);
  Element* shared_k = shared_q + Int<Traits::SharedQ::kElements>{};
  Element* shared_v = shared_k + Int<Traits::SharedKv::kElements>{};
  auto s_q = make_tensor(make_smem_ptr(shared_q), typename Traits::SharedQ::Layout{});
  auto s_k = make_tensor(make_smem_ptr(shared_k), typename Traits::SharedKv::Layout{});
  auto s_v = make_tensor(make_smem_ptr(shared_v), typename Traits::SharedKv::Layout{});
  auto s_vt = make_tensor(s_v.data(), typename Traits::SharedKv::TransposedLayout{});
  // The same shape without the swizzle, for the fragment's layout alone.
  auto s_vt_plain = make_tensor(s_v.data(), get_nonswizzle_portion(typename Traits::SharedKv::TransposedLayout{}));

  typename Traits::TiledMma mma;
  auto thread_mma = mma.get_thread_slice(thread);
  auto r_q = thread_mma.partition_fragment_A(s_q);
  auto r_k = thread_mma.partition_fragment_B(s_k);
  auto r_v = thread_mma.partition_fragment_B(s_vt_plain);
  auto copy_q = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
  auto copy_k = make_tiled_copy_B(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
  auto copy_v = make_tiled_copy_B(Copy_Atom<SM75_U16x8_LDSM_T, Element>{}, mma);
  auto thread_copy_q = copy_q.get_thread_slice(thread);
  auto thread_copy_k = copy_k.get_thread_slice(thread);
  auto thread_copy_v = copy_v.get_thread_slice(thread);
  const auto from_q = thread_copy_q.partition_S(s_q);
  const auto from_k = thread_copy_k.partition_S(s_k);
  const auto from_v = thread_copy_v.partition_S(s_vt);

  const TileSchedule schedule{params.rows, kBlockM};
  const std::int64_t work = schedule.num_ids() * params.num_q_heads;
  for (std::int64_t item = blockIdx.x; item < work; item += gridDim.x) {
    // Late tiles first: under a causal mask they are the long ones. Heads run fastest, so that the CTAs in flight share
    // their K and V in L2.
    const std::int64_t id = schedule.num_ids() - 1 - item / params.num_q_heads;
    const int head = static_cast<int>(item % params.num_q_heads);
    const TileSchedule::Tile tile = schedule.tile(id);
    if (tile.row >= tile.length) continue;

    const int length = static_cast<int>(tile.length);  // under 2^31: the host refuses longer tensors
    const int first_row = static_cast<int>(tile.row);
    const int rows = min(kBlockM, length - first_row);
    const std::int64_t first_global = tile.begin + tile.row;
    Element* out =
        static_cast<Element*>(params.out) + first_global * params.out_row_stride + head * params.out_head_stride;
    float* lse = params.lse == nullptr
                     ? nullptr
                     : params.lse + first_global * params.lse_row_stride + head * params.lse_head_stride;

    auto acc_o = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kHeadDim>>{});
    clear(acc_o);
    auto o = make_tensor(acc_o.data(), rows_and_columns(acc_o.layout()));
    constexpr int kThreadRows = decltype(size<0>(o))::value;
    OnlineSoftmax<kThreadRows> softmax;

    const auto coordinates_s = thread_mma.partition_C(make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{}));
    const auto at = make_tensor(coordinates_s.data(), rows_and_columns(coordinates_s.layout()));

    __syncthreads();  // the last tile's epilogue has left shared memory
    if (params.rows.owned(tile.segment)) {
      const int kv_head = head / params.group();
      const Element* q =
          static_cast<const Element*>(params.q.data) + first_global * params.q.row_stride + head * params.q.head_stride;
      const Element* k = static_cast<const Element*>(params.k.data) + tile.begin * params.k.row_stride +
                         kv_head * params.k.head_stride;
      const Element* v = static_cast<const Element*>(params.v.data) + tile.begin * params.v.row_stride +
                         kv_head * params.v.head_stride;
      const int last_row = first_row + rows - 1;
      const int key_begin = params.mask.lo(first_row, length), key_end = params.mask.hi(last_row, length);
      // Every row of the tile sees the keys between these two: no mask inside.
      const int full_begin = params.mask.lo(last_row, length), full_end = params.mask.hi(first_row, length);
      const float scale = params.scale * kLog2E;

      load_rows<Traits, typename Traits::SharedQ>(shared_q, q, params.q.row_stride, rows, head_dim, aligned.q);
      load_rows<Traits, typename Traits::SharedKv>(shared_k, k + key_begin * params.k.row_stride, params.k.row_stride,
                                                   length - key_begin, head_dim, aligned.k);
      cp_async_fence();

      for (int key = key_begin; key < key_end; key += kBlockN) {
        cp_async_wait<0>();
        __syncthreads();  // K (and Q) are here, and every warp is done with the last V
        load_rows<Traits, typename Traits::SharedKv>(shared_v, v + key * params.v.row_stride, params.v.row_stride,
                                                     length - key, head_dim, aligned.v);
        cp_async_fence();

        auto acc_s = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});
        clear(acc_s);
        gemm_shared(acc_s, r_q, r_k, from_q, from_k, mma, copy_q, copy_k, thread_copy_q, thread_copy_k);

        cp_async_wait<0>();
        __syncthreads();  // V is here, and every warp is done with K
        if (key + kBlockN < key_end) {
          load_rows<Traits, typename Traits::SharedKv>(shared_k, k + (key + kBlockN) * params.k.row_stride,
                                                       params.k.row_stride, length - key - kBlockN, head_dim,
                                                       aligned.k);
          cp_async_fence();
        }

        auto scores = make_tensor(acc_s.data(), rows_and_columns(acc_s.layout()));
        // Scaled before the mask: scale may be 0 or negative, and 0 * -inf is NaN.
#pragma unroll
        for (int i = 0; i < decltype(size(acc_s))::value; ++i) acc_s(i) *= scale;
        if (key < full_begin || key + kBlockN > full_end) {
#pragma unroll
          for (int r = 0; r < kThreadRows; ++r) {
            const int row = min(first_row + static_cast<int>(get<0>(at(r, 0))), length - 1);
            const int lo = params.mask.lo(row, length) - key, hi = params.mask.hi(row, length) - key;
#pragma unroll
            for (int c = 0; c < decltype(size<1>(scores))::value; ++c) {
              const int j = static_cast<int>(get<1>(at(0, c)));
              if (j < lo || j >= hi) scores(r, c) = -INFINITY;
            }
          }
        }
        softmax.update(scores, o);
        const auto p = converted<Element>(acc_s);
        const auto r_p = make_tensor(p.data(), as_a_operand(p.layout()));
        gemm_registers(acc_o, r_p, r_v, from_v, mma, copy_v, thread_copy_v);
      }
      softmax.finish();
    }

    // Epilogue. A warp reads and writes only its own rows of Q's buffer until the barrier.
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const float inverse = inverse_of_sum(softmax.sum[r]);
#pragma unroll
      for (int c = 0; c < decltype(size<1>(o))::value; ++c) o(r, c) *= inverse;
    }
    const auto result = converted<Element>(acc_o);
    auto s_o = make_tensor(s_q.data(), typename Traits::SharedQ::Layout{});
    auto copy_o = make_tiled_copy_C(Copy_Atom<AutoVectorizingCopyWithAssumedAlignment<32>, Element>{}, mma);
    auto thread_copy_o = copy_o.get_thread_slice(thread);
    __syncthreads();
    cute::copy(copy_o, thread_copy_o.retile_S(result), thread_copy_o.partition_D(s_o));
    if (lse != nullptr) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
        const int row = static_cast<int>(get<0>(at(r, 0)));
        if (get<1>(at(0, 0)) == 0 && row < rows) {
          lse[row * params.lse_row_stride] = natural_lse(softmax.maximum[r], softmax.sum[r]);
        }
      }
    }
    __syncthreads();
    constexpr int kChunks = kHeadDim / kChunk;
#pragma unroll 4
    for (int index = thread; index < kBlockM * kChunks; index += Traits::kThreads) {
      const int row = index / kChunks, column = index % kChunks * kChunk;
      if (row >= rows || column >= head_dim) continue;
      const Element* source = &s_o(row, column);
      Element* target = out + row * params.out_row_stride + column;
      if (aligned.out) {
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
      } else {
        for (int i = 0; i < kChunk; ++i) target[i] = source[i];
      }
    }
  }
}

template <typename Element, int kHeadDim>
void launch_ragged(const RaggedKernelParams& params, int device, StreamHandle stream) {
  using Traits = RaggedTraits<Element, kHeadDim>;
  const TileSchedule schedule{params.params.rows, Traits::kBlockM};
  launch<ragged_kernel<Traits>>(params, schedule.num_ids() * params.params.num_q_heads, Traits::kThreads,
                                Traits::kSharedBytes, device, static_cast<cudaStream_t>(stream),
                                "launching ragged_flash_attention");
}

}  // namespace ragged_attention::portable
