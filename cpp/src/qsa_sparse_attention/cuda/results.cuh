// From the warps' partial results to the caller's tensors.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include "common/cuda/attention.cuh"
#include "qsa_sparse_attention/cuda/launch.h"

namespace ragged_attention::portable {

// Four neighbouring elements of one output row.
template <typename Element>
__device__ __forceinline__ void store_four_as(void* row, int column, float4 value, bool aligned) {
  Element* target = static_cast<Element*>(row) + column;
  alignas(16) const Element four[4] = {Element(value.x), Element(value.y), Element(value.z), Element(value.w)};
  if (aligned) {
    if constexpr (sizeof(Element) == 4) {
      *reinterpret_cast<float4*>(target) = *reinterpret_cast<const float4*>(four);
    } else {
      *reinterpret_cast<uint2*>(target) = *reinterpret_cast<const uint2*>(four);
    }
  } else {
    for (int i = 0; i < 4; ++i) target[i] = four[i];
  }
}

__device__ __forceinline__ void store_four(const QsaKernelParams& kernel_params, std::int64_t row, int head, int column,
                                           float4 value) {
  const QsaParams& params = kernel_params.params;
  const std::int64_t offset = row * params.out_row_stride + head * params.out_head_stride;
  char* base = static_cast<char*>(params.out);
  const bool aligned = kernel_params.out_aligned;
  switch (kernel_params.out_type) {
    case OutType::kFloat32:
      store_four_as<float>(base + offset * 4, column, value, aligned);
      break;
    case OutType::kFloat16:
      store_four_as<cutlass::half_t>(base + offset * 2, column, value, aligned);
      break;
    case OutType::kBFloat16:
      store_four_as<cutlass::bfloat16_t>(base + offset * 2, column, value, aligned);
      break;
  }
}

// What the warps of a CTA leave in shared memory, each for its share of one row's list: [warp][head] running maximum
// (log2 units) and sum, [warp][head][kWidth] unnormalised output.
struct WarpPartials {
  float* maxima;
  float* sums;
  float* outputs;
};

// Merges them in warp order and stores output and LSE of `heads` query heads from `first_head` on. Call it with all
// threads after a barrier.
template <int kHeads, int kWidth>
__device__ __forceinline__ void merge_and_store(const QsaKernelParams& kernel_params, const WarpPartials& partials,
                                                int warps, std::int64_t row, int first_head, int heads) {
  const QsaParams& params = kernel_params.params;
  constexpr int kFours = kWidth / 4;
  for (int index = static_cast<int>(threadIdx.x); index < heads * kFours; index += static_cast<int>(blockDim.x)) {
    const int head = index / kFours, column = index % kFours * 4;
    if (column >= params.head_dim) continue;
    float largest = -INFINITY;
    for (int w = 0; w < warps; ++w) largest = fmaxf(largest, partials.maxima[w * kHeads + head]);
    const float reference = largest == -INFINITY ? 0.0f : largest;  // never -inf - -inf
    float total = 0.0f;
    float4 result = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int w = 0; w < warps; ++w) {
      const int slot = w * kHeads + head;
      const float weight = exp2_approximate(partials.maxima[slot] - reference);
      const float4 part = *reinterpret_cast<const float4*>(partials.outputs + slot * kWidth + column);
      total = fmaf(weight, partials.sums[slot], total);
      result.x = fmaf(weight, part.x, result.x);
      result.y = fmaf(weight, part.y, result.y);
      result.z = fmaf(weight, part.z, result.z);
      result.w = fmaf(weight, part.w, result.w);
    }
    const float inverse = inverse_of_sum(total);
    result = make_float4(result.x * inverse, result.y * inverse, result.z * inverse, result.w * inverse);
    store_four(kernel_params, row, first_head + head, column, result);
    if (column == 0 && params.lse != nullptr) {
      params.lse[row * params.lse_row_stride + (first_head + head) * params.lse_head_stride] =
          natural_lse(largest, total);
    }
  }
}

}  // namespace ragged_attention::portable
