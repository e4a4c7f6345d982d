// What every softmax on the GPU is made of, without CuTe.
#pragma once

namespace ragged_attention {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// 2^x in one instruction: 2 ulp, 0 at -inf, NaN and +inf through; results under 2^-126 are 0.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Natural log of the sum of exp of a row, its maximum in units of log2; -inf for a row that saw nothing.
__device__ __forceinline__ float natural_lse(float maximum, float sum) {
  return sum == 0.0f ? -INFINITY : (maximum + log2f(sum)) * kLn2;
}

}  // namespace ragged_attention
