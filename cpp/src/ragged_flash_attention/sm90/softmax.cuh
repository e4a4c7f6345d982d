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

// The larger of `largest` and two scores, in one instruction. As integers: right where `largest` is not negative, since
// floats that are negative are so as integers, and those that are not have the same order.
__device__ __forceinline__ float max_of_three(float largest, float a, float b) {
  return __int_as_float(__vimax3_s32(__float_as_int(largest), __float_as_int(a), __float_as_int(b)));
}

struct OnlineSoftmax {
  float scale_log2;  // positive; scores are multiplied by it on the way into exp2
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};  // of this thread's columns

  __device__ explicit OnlineSoftmax(float scale) : scale_log2(scale) {}

  // Scores become exp(scale (score - maximum)), and the sums take them in. `factor`: what turns earlier results into
  // terms of the new maximum. Where it returns false, that is 1 in all rows of the warp, and not set.
  //
  // Voted: the fewest instructions, with branches. Else no branches but one that is not taken, so that all runs beside
  // all.
  template <bool kVoted, int kSize>
  __device__ __forceinline__ bool update(float (&scores)[kSize], float (&factor)[2]) {
    if constexpr (kVoted) {
      return update_voted(scores, factor);
    } else {
      update_all(scores, factor);
      return true;
    }
  }

  // Of a row that sees one key, row 0: what to multiply its value by.
  __device__ __forceinline__ float of_one(float score) {
    maximum[0] = score;
    sum[0] = score == -INFINITY ? 0.0f : exp2_approximate(score - score);  // 1, or NaN
    return sum[0];
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

 private:
  // The new maximum of row r.
  template <int kSize>
  __device__ __forceinline__ float largest(const float (&scores)[kSize], int r) const {
    // Four chains: the latency of one would be most of the cost.
    float chains[4] = {maximum[r], -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      chains[i % 2 * 2] = fmaxf(chains[i % 2 * 2], scores[4 * i + 2 * r]);
      chains[i % 2 * 2 + 1] = fmaxf(chains[i % 2 * 2 + 1], scores[4 * i + 2 * r + 1]);
    }
    return quad_max(fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3])));
  }

  // Of row r.
  template <int kSize>
  __device__ __forceinline__ static float total(const float (&scores)[kSize], int r) {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      even += scores[4 * i + 2 * r];
      odd += scores[4 * i + 2 * r + 1];
    }
    return even + odd;
  }

  // What is subtracted of row r's scaled scores. A row that has seen nothing yet: -inf - -inf would be NaN.
  __device__ __forceinline__ float offset_of(float largest) const {
    return largest == -INFINITY ? 0.0f : __fmul_rn(largest, scale_log2);
  }

  // Rounded as the offset was, not fused: an unchanged maximum then gives a factor of exactly 1, where the rest of a
  // fused multiplication would multiply up over the tiles of a long sequence.
  __device__ __forceinline__ float factor_of(float offset, int r) const {
    return exp2_approximate(__fsub_rn(__fmul_rn(maximum[r], scale_log2), offset));
  }

  template <int kSize>
  __device__ __forceinline__ void exponentials(float (&scores)[kSize], const float (&offset)[2]) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) scores[i] = exp2_approximate(__fmaf_rn(scores[i], scale_log2, -offset[i / 2 % 2]));
  }

  template <int kSize>
  __device__ __forceinline__ void update_all(float (&scores)[kSize], float (&factor)[2]) {
    float row[2], offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row[r] = largest(scores, r);
      offset[r] = offset_of(row[r]);
      factor[r] = factor_of(offset[r], r);
    }
    // A maximum that comes back from beyond is not looked for: it is off by 2^-10 at most, just behind the border.
    if (__any_sync(0xffffffff, fmaxf(fabsf(offset[0]), fabsf(offset[1])) > kFar)) {
      from_maximum(scores, row, offset, factor);
    }
    exponentials(scores, offset);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = row[r];
      sum[r] = __fmaf_rn(sum[r], factor[r], total(scores, r));
    }
  }

  template <int kSize>
  __device__ __forceinline__ bool update_voted(float (&scores)[kSize], float (&factor)[2]) {
    float row[2];
    bool negative = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int i = 0; i < kSize / 8; ++i) {
        even = max_of_three(even, scores[8 * i + 2 * r], scores[8 * i + 2 * r + 1]);
        odd = max_of_three(odd, scores[8 * i + 4 + 2 * r], scores[8 * i + 4 + 2 * r + 1]);
      }
      row[r] = quad_max(max_of_three(even, odd, maximum[r]));
      negative |= !(row[r] > 0.0f);
    }
    if (__any_sync(0xffffffff, negative)) {  // then 0 stands for a maximum that is none
#pragma unroll
      for (int r = 0; r < 2; ++r) row[r] = largest(scores, r);
    }
    float offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) offset[r] = offset_of(row[r]);
    const bool moved =
        __any_sync(0xffffffff, row[0] != maximum[0] || row[1] != maximum[1] || far(row[0]) || far(row[1]));
    if (moved) {
#pragma unroll
      for (int r = 0; r < 2; ++r) factor[r] = factor_of(offset[r], r);
      if (__any_sync(0xffffffff, far(row[0]) || far(row[1]) || far(maximum[0]) || far(maximum[1]))) {
        from_maximum(scores, row, offset, factor);
      }
    }
    exponentials(scores, offset);
#pragma unroll
    for (int r = 0; r < 2; ++r) maximum[r] = row[r];
    if (moved) {
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] *= factor[r];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += total(scores, r);
    return moved;
  }

  // Up to here, the scaled maximum may be rounded before it is subtracted: all terms of a row count from the rounded
  // one, off by 2^-10 at most. Beyond, the rounding grows with it, to many powers of two at 1e9, and exponents count
  // from the maximum itself.
  static constexpr float kFar = 16384.0f;
  __device__ __forceinline__ bool far(float largest) const {
    return fabsf(__fmul_rn(largest, scale_log2)) > kFar && largest != -INFINITY;
  }

  // Where some row's maximum is far: takes it from the scores and sets what is left to subtract.
  template <int kSize>
  __device__ __forceinline__ void from_maximum(float (&scores)[kSize], const float (&row)[2], float (&offset)[2],
                                               float (&factor)[2]) const {
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // What exponents counted from before, scale * before + offset_before, of which one term is 0; and now.
      const float before = far(maximum[r]) ? maximum[r] : 0.0f;
      const float offset_before = far(maximum[r]) ? 0.0f : __fmul_rn(maximum[r], scale_log2);
      shift[r] = far(row[r]) ? row[r] : 0.0f;
      offset[r] = far(row[r]) ? 0.0f : offset[r];
      factor[r] = exp2_approximate(__fmaf_rn(before - shift[r], scale_log2, offset_before - offset[r]));
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) scores[i] -= shift[i / 2 % 2];
  }
};

}  // namespace ragged_attention::sm90
