// Online softmax on a warpgroup's accumulator of scores: each thread has two rows (wgmma.cuh says which elements).
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include <cstdint>
#include <type_traits>

#include "common/cuda/softmax_math.cuh"

namespace ragged_attention::sm90 {

// Rounded to nearest even, `low` in the low half.
template <typename Element>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <typename Element, int kSize>
__device__ __forceinline__ void pack_all(const float (&from)[kSize], std::uint32_t (&to)[kSize / 2]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) to[i] = pack<Element>(from[2 * i], from[2 * i + 1]);
}

// Multiplies row r of an accumulator by factor[r].
template <int kSize>
__device__ __forceinline__ void scale_rows(float (&accumulator)[kSize], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) accumulator[i] *= factor[i / 2 % 2];
}

// Scores outside [lo[r], hi[r]), counted from the thread's first column, become -inf.
template <int kSize>
__device__ __forceinline__ void mask_rows(float (&scores)[kSize], const int (&lo)[2], const int (&hi)[2]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const int column = i / 4 * 8 + i % 2, r = i / 2 % 2;
    if (column < lo[r] || column >= hi[r]) scores[i] = -INFINITY;
  }
}

struct OnlineSoftmax {
  float scale_log2;  // positive; scores are multiplied by it on the way into exp2
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};  // of this thread's columns

  __device__ explicit OnlineSoftmax(float scale) : scale_log2(scale) {}

  // Scores become exp(scale (score - maximum)), and the sums take them in. `factor`: what turns earlier results into
  // terms of the new maximum.
  template <int kSize>
  __device__ __forceinline__ void update(float (&scores)[kSize], float (&factor)[2]) {
    constexpr int kPairs = kSize / 4;  // of columns of a row
    float offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Four chains: the latency of one would be most of the cost.
      float largest[4] = {maximum[r], -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        largest[i % 2 * 2] = fmaxf(largest[i % 2 * 2], scores[4 * i + 2 * r]);
        largest[i % 2 * 2 + 1] = fmaxf(largest[i % 2 * 2 + 1], scores[4 * i + 2 * r + 1]);
      }
      float row = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
      row = quad_max(row);
      // A row that has seen nothing yet: -inf - -inf would be NaN.
      offset[r] = row == -INFINITY ? 0.0f : __fmul_rn(row, scale_log2);
      // Rounded as the offset was, not fused: an unchanged maximum then gives a factor of exactly 1, where the rest of
      // a fused multiplication would multiply up over the tiles of a long sequence.
      factor[r] = exp2_approximate(__fsub_rn(__fmul_rn(maximum[r], scale_log2), offset[r]));
      maximum[r] = row;
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) scores[i] = exp2_approximate(__fmaf_rn(scores[i], scale_log2, -offset[i / 2 % 2]));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        even += scores[4 * i + 2 * r];
        odd += scores[4 * i + 2 * r + 1];
      }
      sum[r] = __fmaf_rn(sum[r], factor[r], even + odd);
    }
  }

  // Adds up the sums of the four threads of a row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = quad_sum(sum[r]);
  }

  // 0 for a row that saw nothing; NaN stays NaN.
  __device__ __forceinline__ float inverse(int r) const {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum[r]));  // within 1 ulp
    return sum[r] == 0.0f ? 0.0f : inverse;
  }

  // Natural log of the sum of exp of the scaled scores; -inf for a row that saw nothing.
  __device__ __forceinline__ float lse(int r) const {
    // As natural_lse(), but for log2 in one instruction: the other's registers make a kernel spill.
    return sum[r] == 0.0f ? -INFINITY : (__fmul_rn(maximum[r], scale_log2) + __log2f(sum[r])) * kLn2;
  }
};

}  // namespace ragged_attention::sm90
