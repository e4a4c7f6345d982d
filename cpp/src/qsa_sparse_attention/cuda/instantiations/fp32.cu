// Row-by-row QSA attention for float32 on FMA units: exact float32 products, no TF32.
//
// Schedule of one CTA: one query row, one kv head, up to 4 of its query heads; 4 warps share out the list in tiles of 4
// entries, tile t to warp t % 4. Lanes lie along the head dim: lane l holds columns 4 l .. 4 l + 3 and 128 + 4 l .. of
// Q, K, V and O, so a token's row is one or two coalesced loads, and a score is a sum over the warp. At the end the
// warps' partial results are merged in warp order through shared memory.
#include "common/cuda/attention.cuh"
#include "common/cuda/launch.h"
#include "qsa_sparse_attention/cuda/config.h"
#include "qsa_sparse_attention/cuda/launch.h"
#include "qsa_sparse_attention/cuda/results.cuh"

namespace ragged_attention::portable {

struct EightFloats {
  float4 part[2];

  __device__ __forceinline__ void load(const float* row, int lane, int head_dim, bool aligned) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 128 * i + 4 * lane;
      if (column >= head_dim) {
        part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      } else if (aligned) {
        part[i] = *reinterpret_cast<const float4*>(row + column);
      } else {
        part[i] = make_float4(row[column], row[column + 1], row[column + 2], row[column + 3]);
      }
    }
  }

  // A token's row, zeros where it is not listed.
  __device__ __forceinline__ void load(std::int64_t offset, const float* cache, int lane, int head_dim, bool aligned) {
    const bool listed = offset != kNotListed;
    load(listed ? cache + offset : cache, lane, listed ? head_dim : 0, aligned);
  }

  __device__ __forceinline__ float dot(const EightFloats& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum = fmaf(part[i].x, other.part[i].x, sum);
      sum = fmaf(part[i].y, other.part[i].y, sum);
      sum = fmaf(part[i].z, other.part[i].z, sum);
      sum = fmaf(part[i].w, other.part[i].w, sum);
    }
    return sum;
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      part[i].x *= factor;
      part[i].y *= factor;
      part[i].z *= factor;
      part[i].w *= factor;
    }
  }

  __device__ __forceinline__ void add(float weight, const EightFloats& other) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      part[i].x = fmaf(weight, other.part[i].x, part[i].x);
      part[i].y = fmaf(weight, other.part[i].y, part[i].y);
      part[i].z = fmaf(weight, other.part[i].z, part[i].z);
      part[i].w = fmaf(weight, other.part[i].w, part[i].w);
    }
  }
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kWarps * 32)
    qsa_fp32_kernel(const __grid_constant__ QsaKernelParams kernel_params) {
  constexpr int kHeads = Shape::kHeads, kKeys = Shape::kKeys, kWarps = Shape::kWarps, kMostHeadDim = 256;
  __shared__ float maxima[kWarps][kHeads], sums[kWarps][kHeads];
  __shared__ __align__(16) float outputs[kWarps][kHeads][kMostHeadDim];

  const QsaParams& params = kernel_params.params;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int group = params.group(), head_dim = params.head_dim;
  const int head_tiles = (group + kHeads - 1) / kHeads;
  const float scale = params.scale * kLog2E;

  const std::int64_t work = params.rows.total * params.num_kv_heads * head_tiles;
  for (std::int64_t item = blockIdx.x; item < work; item += gridDim.x) {
    const int head_tile = static_cast<int>(item % head_tiles);
    const int kv_head = static_cast<int>(item / head_tiles % params.num_kv_heads);
    const std::int64_t row = item / head_tiles / params.num_kv_heads;
    const int first_head = kv_head * group + head_tile * kHeads;
    const int heads = min(kHeads, group - head_tile * kHeads);
    const QsaParams::RowSource source = params.source(row);
    const std::int64_t count = source.sequence < 0 ? 0 : params.count(row);
    const std::int32_t* list = params.token_indices + row * params.token_indices_row_stride;
    const float* k = static_cast<const float*>(params.cache.k) + kv_head * params.cache.head_stride;
    const float* v = static_cast<const float*>(params.cache.v) + kv_head * params.cache.head_stride;

    EightFloats q[kHeads], o[kHeads];
    float maximum[kHeads], sum[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float* from =
          static_cast<const float*>(params.q) + row * params.q_row_stride + (first_head + h) * params.q_head_stride;
      q[h].load(from, lane, h < heads ? head_dim : 0, kernel_params.q_aligned);
      o[h] = {};
      maximum[h] = -INFINITY;
      sum[h] = 0.0f;
    }

    for (std::int64_t first = std::int64_t{warp} * kKeys; first < count; first += kWarps * kKeys) {
      EightFloats tokens[kKeys];
      std::int64_t offset[kKeys];
      float score[kKeys][kHeads];
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        offset[i] = first + i < count ? token_offset(params.cache, source.sequence, list[first + i], source.length)
                                      : kNotListed;
        tokens[i].load(offset[i], k, lane, head_dim, kernel_params.kv_aligned);
      }
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float s = warp_sum(tokens[i].dot(q[h])) * scale;
          score[i][h] = offset[i] == kNotListed ? -INFINITY : s;
        }
        tokens[i].load(offset[i], v, lane, head_dim, kernel_params.kv_aligned);
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float largest = maximum[h];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) largest = fmaxf(largest, score[i][h]);
        const float reference = largest == -INFINITY ? 0.0f : largest;  // never -inf - -inf
        const float rescale = exp2_approximate(maximum[h] - reference);
        maximum[h] = largest;
        sum[h] *= rescale;
        o[h].scale(rescale);
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          const float weight = exp2_approximate(score[i][h] - reference);
          sum[h] += weight;
          o[h].add(weight, tokens[i]);
        }
      }
    }

    __syncthreads();  // the last row's merge is done
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (lane == 0) {
        maxima[warp][h] = maximum[h];
        sums[warp][h] = sum[h];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) *reinterpret_cast<float4*>(&outputs[warp][h][128 * i + 4 * lane]) = o[h].part[i];
    }
    __syncthreads();
    const WarpPartials partials{&maxima[0][0], &sums[0][0], &outputs[0][0][0]};
    merge_and_store<kHeads, kMostHeadDim>(kernel_params, partials, kWarps, row, first_head, heads);
  }
}

void launch_qsa_fp32(const QsaKernelParams& params, int device, StreamHandle stream) {
  const std::int64_t head_tiles = (params.params.group() + QsaFp32::kHeads - 1) / QsaFp32::kHeads;
  launch<qsa_fp32_kernel<QsaFp32>>(params, params.params.rows.total * params.params.num_kv_heads * head_tiles,
                                   QsaFp32::kWarps * 32, 0, device, static_cast<cudaStream_t>(stream),
                                   "launching qsa_sparse_attention");
}

}  // namespace ragged_attention::portable
