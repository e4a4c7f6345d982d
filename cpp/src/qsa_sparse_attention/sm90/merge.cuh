// Parts of one row that were computed apart, each with a softmax of its own, put together two by two.
#pragma once

#include "common/cuda/softmax_math.cuh"
#include "qsa_sparse_attention/cuda/results.cuh"

namespace ragged_attention::sm90 {

// What two parts count for in their sum, whose terms are relative to `maximum`; maxima are in units of log2.
struct MergeWeights {
  float maximum, first, second;

  __device__ __forceinline__ MergeWeights(float first_maximum, float second_maximum)
      : maximum(fmaxf(first_maximum, second_maximum)), first(weight(first_maximum)), second(weight(second_maximum)) {}

  // One rounding at a time: registers and shared memory give the same bits.
  __device__ __forceinline__ float operator()(float a, float b) const {
    return __fmaf_rn(second, b, __fmul_rn(first, a));
  }

 private:
  // Two that are equal may both be -inf or inf.
  __device__ __forceinline__ float weight(float of) const {
    return of == maximum ? 1.0f : exp2_approximate(of - maximum);
  }
};

// What a part of a row has of four columns: maximum, sum, and unnormalised output.
struct RowPart {
  float maximum, sum;
  float4 output;

  __device__ __forceinline__ void add(const RowPart& other) {
    const MergeWeights merged(maximum, other.maximum);
    maximum = merged.maximum;
    sum = merged(sum, other.sum);
    output = make_float4(merged(output.x, other.output.x), merged(output.y, other.output.y),
                         merged(output.z, other.output.z), merged(output.w, other.output.w));
  }

  // Of the whole row, with the LSE where its first columns are.
  __device__ __forceinline__ void store(const portable::QsaKernelParams& call, std::int64_t row, int head,
                                        int column) const {
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    portable::store_four(call, row, head, column,
                         make_float4(output.x * inverse, output.y * inverse, output.z * inverse, output.w * inverse));
    const QsaParams& params = call.params;
    if (params.lse != nullptr && column == 0) {
      params.lse[row * params.lse_row_stride + head * params.lse_head_stride] = natural_lse(maximum, sum);
    }
  }
};

// Neighbours first, then pairs, and so on.
template <int kParts>
__device__ __forceinline__ const RowPart& merged(RowPart (&parts)[kParts]) {
#pragma unroll
  for (int step = 1; step < kParts; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kParts; i += 2 * step) parts[i].add(parts[i + step]);
  }
  return parts[0];
}

}  // namespace ragged_attention::sm90
