// What the portable tensor-core kernels share: copies into swizzled shared memory, fragments, online softmax.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cutlass/numeric_conversion.h>

#include <cstdint>
#include <cute/tensor.hpp>
#include <type_traits>

#include "common/cuda/softmax_math.cuh"

namespace ragged_attention {

// Elements of one 16-byte chunk, the unit of every copy. Head dims are multiples of 8.
constexpr int kChunk = 8;

// Rows of kWidth elements, swizzled so that both the 16-byte writes and ldmatrix's reads of 8 rows are free of bank
// conflicts: 64 columns (128 bytes) an atom where the width allows it, else 32.
template <typename Element, int kRows, int kWidth>
struct SwizzledTile {
  static constexpr int kAtomWidth = kWidth % 64 == 0 ? 64 : 32;
  static constexpr int kSwizzleBits = kAtomWidth == 64 ? 3 : 2;
  using Atom = decltype(cute::composition(
      cute::Swizzle<kSwizzleBits, 3, 3>{},
      cute::Layout<cute::Shape<cute::_8, cute::Int<kAtomWidth>>, cute::Stride<cute::Int<kAtomWidth>, cute::_1>>{}));
  using Layout = decltype(cute::tile_to_shape(Atom{}, cute::Shape<cute::Int<kRows>, cute::Int<kWidth>>{}));
  // The same memory read as [kWidth, kRows]: V as the B operand of P @ V.
  using TransposedLayout = decltype(cute::composition(
      Layout{}, cute::make_layout(cute::Shape<cute::Int<kWidth>, cute::Int<kRows>>{}, cute::GenRowMajor{})));
  static constexpr int kElements = kRows * kWidth;
};

template <typename Element>
struct MmaAtom;
template <>
struct MmaAtom<cutlass::half_t> {
  using Type = cute::MMA_Atom<cute::SM80_16x8x16_F32F16F16F32_TN>;
};
template <>
struct MmaAtom<cutlass::bfloat16_t> {
  using Type = cute::MMA_Atom<cute::SM80_16x8x16_F32BF16BF16F32_TN>;
};

// m16n8k16, kWarps of them along M.
template <typename Element, int kWarps>
using WarpsAlongM =
    cute::TiledMMA<typename MmaAtom<Element>::Type, cute::Layout<cute::Shape<cute::Int<kWarps>, cute::_1, cute::_1>>,
                   cute::Tile<cute::Int<16 * kWarps>, cute::_16, cute::_16>>;

// 16 bytes from global to shared memory. Where `valid` is false, zeros, and nothing is read. `aligned` says whether the
// tensor's chunks all start on 16 bytes; if not, element by element.
template <typename Element>
__device__ __forceinline__ void copy_chunk(Element* shared, const Element* global, bool valid, bool aligned) {
  static_assert(sizeof(Element) == 2);
  if (aligned) {
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*reinterpret_cast<const cute::uint128_t*>(global),
                                                                 *reinterpret_cast<cute::uint128_t*>(shared), valid);
    return;
  }
  alignas(16) Element chunk[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) chunk[i] = valid ? global[i] : Element(0.0f);
  *reinterpret_cast<uint4*>(shared) = *reinterpret_cast<const uint4*>(chunk);
}

// The accumulator's layout ((2, 2), M, N) as rows and columns: ((2, M), (2, N)).
template <typename Layout>
CUTE_HOST_DEVICE constexpr auto rows_and_columns(Layout layout) {
  using namespace cute;
  return make_layout(make_layout(get<0, 1>(layout), get<1>(layout)), make_layout(get<0, 0>(layout), get<2>(layout)));
}

// The accumulator of S, ((2, 2), M, N), as the A operand of P @ V, ((2, 2, 2), M, N / 2): two n8 tiles are one k16
// step.
template <typename Layout>
CUTE_HOST_DEVICE constexpr auto as_a_operand(Layout layout) {
  using namespace cute;
  const auto split = logical_divide(layout, Shape<Underscore, Underscore, _2>{});
  return make_layout(make_layout(get<0>(split), get<2, 0>(split)), get<1>(split), get<2, 1>(split));
}

template <typename Element, typename Engine, typename Layout>
__device__ __forceinline__ auto converted(const cute::Tensor<Engine, Layout>& source) {
  constexpr int kSize = decltype(cute::size(source))::value;
  cutlass::NumericArrayConverter<Element, float, kSize> convert;
  const auto fragment = convert(*reinterpret_cast<const cutlass::Array<float, kSize>*>(source.data()));
  auto result = cute::make_tensor<Element>(source.layout());
  *reinterpret_cast<cutlass::Array<Element, kSize>*>(result.data()) = fragment;
  return result;
}

// C += A @ B^T with both operands in shared memory, fragments of the next k-step loaded under this one's MMAs.
template <typename Accumulator, typename FragmentA, typename FragmentB, typename SharedA, typename SharedB,
          typename TiledMma, typename CopyA, typename CopyB, typename ThreadCopyA, typename ThreadCopyB>
__device__ __forceinline__ void gemm_shared(Accumulator& accumulator, FragmentA& a, FragmentB& b,
                                            const SharedA& shared_a, const SharedB& shared_b, TiledMma mma,
                                            CopyA copy_a, CopyB copy_b, ThreadCopyA thread_copy_a,
                                            ThreadCopyB thread_copy_b) {
  using namespace cute;
  auto a_view = thread_copy_a.retile_D(a);
  auto b_view = thread_copy_b.retile_D(b);
  copy(copy_a, shared_a(_, _, _0{}), a_view(_, _, _0{}));
  copy(copy_b, shared_b(_, _, _0{}), b_view(_, _, _0{}));
  constexpr int kSteps = decltype(size<2>(a))::value;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if (k + 1 < kSteps) {
      copy(copy_a, shared_a(_, _, k + 1), a_view(_, _, k + 1));
      copy(copy_b, shared_b(_, _, k + 1), b_view(_, _, k + 1));
    }
    gemm(mma, a(_, _, k), b(_, _, k), accumulator);
  }
}

// C += A @ B^T with A in registers.
template <typename Accumulator, typename FragmentA, typename FragmentB, typename SharedB, typename TiledMma,
          typename CopyB, typename ThreadCopyB>
__device__ __forceinline__ void gemm_registers(Accumulator& accumulator, const FragmentA& a, FragmentB& b,
                                               const SharedB& shared_b, TiledMma mma, CopyB copy_b,
                                               ThreadCopyB thread_copy_b) {
  using namespace cute;
  auto b_view = thread_copy_b.retile_D(b);
  copy(copy_b, shared_b(_, _, _0{}), b_view(_, _, _0{}));
  constexpr int kSteps = decltype(size<2>(a))::value;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if (k + 1 < kSteps) copy(copy_b, shared_b(_, _, k + 1), b_view(_, _, k + 1));
    gemm(mma, a(_, _, k), b(_, _, k), accumulator);
  }
}

// Running maximum and sum of kRows rows a thread; the four threads of a quad share a row. Scores are in units of log2.
// Masked scores are -inf; a row that has seen nothing yet has the maximum -inf, for which 0 stands in so that -inf -
// -inf never happens. NaN and +inf scores flow through as NaN.
template <int kRows>
struct OnlineSoftmax {
  float maximum[kRows];
  float sum[kRows];  // this thread's share until finish()

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      maximum[r] = -INFINITY;
      sum[r] = 0.0f;
    }
  }

  // Turns scores (rows x columns) into weights and rescales the output (rows x columns) to the new maximum.
  template <typename Scores, typename Output>
  __device__ __forceinline__ void update(Scores& scores, Output& output) {
    using cute::size;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float largest = scores(r, 0);
#pragma unroll
      for (int c = 1; c < decltype(size<1>(scores))::value; ++c) largest = fmaxf(largest, scores(r, c));
      largest = fmaxf(maximum[r], quad_max(largest));
      const float reference = largest == -INFINITY ? 0.0f : largest;
      const float rescale = exp2_approximate(maximum[r] - reference);
      maximum[r] = largest;
      float total = 0.0f;
#pragma unroll
      for (int c = 0; c < decltype(size<1>(scores))::value; ++c) {
        scores(r, c) = exp2_approximate(scores(r, c) - reference);
        total += scores(r, c);
      }
      sum[r] = sum[r] * rescale + total;
#pragma unroll
      for (int c = 0; c < decltype(size<1>(output))::value; ++c) output(r, c) *= rescale;
    }
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = quad_sum(sum[r]);
  }
};

// 0 where a row saw nothing: its output is 0, not 0 / 0.
__device__ __forceinline__ float inverse_of_sum(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

}  // namespace ragged_attention
