// Storing results in the caller's out dtype.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

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

}  // namespace ragged_attention::portable
