// Parts of one row that were computed apart, put together in their order.
#pragma once

#include "common/cuda/softmax_math.cuh"
#include "qsa_sparse_attention/cuda/results.cuh"

namespace ragged_attention::sm90 {

// What parts of a row have of four columns: maxima in units of log2, sums, and unnormalised outputs.
template <int kParts>
struct RowParts {
  float maxima[kParts], sums[kParts];
  float4 outputs[kParts];

  // Merges and stores them, and the LSE where the row's first columns are.
  __device__ __forceinline__ void store(const portable::QsaKernelParams& call, std::int64_t row, int head,
                                        int column) const {
    float largest = -INFINITY, total = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) largest = fmaxf(largest, maxima[part]);
    float4 result = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      // Two that are equal may both be -inf or inf.
      const float weight = maxima[part] == largest ? 1.0f : exp2_approximate(maxima[part] - largest);
      total = __fmaf_rn(weight, sums[part], total);
      result.x = __fmaf_rn(weight, outputs[part].x, result.x);
      result.y = __fmaf_rn(weight, outputs[part].y, result.y);
      result.z = __fmaf_rn(weight, outputs[part].z, result.z);
      result.w = __fmaf_rn(weight, outputs[part].w, result.w);
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    portable::store_four(call, row, head, column,
                         make_float4(result.x * inverse, result.y * inverse, result.z * inverse, result.w * inverse));
    const QsaParams& params = call.params;
    if (params.lse != nullptr && column == 0) {
      params.lse[row * params.lse_row_stride + head * params.lse_head_stride] = natural_lse(largest, total);
    }
  }
};

}  // namespace ragged_attention::sm90
