// Portable ragged flash attention for float32 on FMA units: exact float32 products, no TF32.
//
// Schedule of one CTA: 64 query rows of one sequence and one query head; 16 x 16 threads, 4 x 4 scores each.
//   1. Find the tile, as the tensor-core kernel does.
//   2. For each tile of 64 keys in the interval that any row sees:
//        S = Q K^T, staging 32 columns of Q and K at a time through shared memory;
//        mask where an edge crosses the tile, online softmax (a row's 16 threads are neighbours in a warp);
//        P to shared memory; O += P V, staging 64 columns of V at a time.
//   3. O / sum straight from registers, 16 bytes a store; LSE beside it.
// Thread (ty, tx) holds rows ty * 4 + r; keys tx + 16 c of S; columns 64 b + 4 tx + c of O.
#pragma once

#include "common/cuda/attention.cuh"
#include "common/cuda/launch.h"
#include "ragged_flash_attention/cuda/config.h"
#include "ragged_flash_attention/cuda/launch.h"

namespace ragged_attention::portable {

// Four floats of a row, zeros where they are not valid.
__device__ __forceinline__ float4 load_four(const float* from, bool valid, bool aligned) {
  if (!valid) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (aligned) return *reinterpret_cast<const float4*>(from);
  return make_float4(from[0], from[1], from[2], from[3]);
}

template <int kHeadDim>
__global__ void __launch_bounds__(RaggedTileFp32::kThreads)
    ragged_fp32_kernel(const __grid_constant__ RaggedKernelParams kernel_params) {
  using Tile = RaggedTileFp32;
  constexpr int kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kKStep = Tile::kKStep, kVStep = Tile::kVStep;
  constexpr int kColumnBlocks = kHeadDim / kVStep;
  // Rows padded by 16 bytes: eight threads reading a float4 each from eight rows meet no bank twice.
  constexpr int kKPitch = kKStep + 4, kVPitch = kVStep + 4, kPPitch = kBlockN + 4;
  __shared__ __align__(16) float s_q[kBlockM * kKPitch];
  __shared__ __align__(16) float s_kv[kBlockN * (kVPitch > kKPitch ? kVPitch : kKPitch)];
  __shared__ __align__(16) float s_p[kBlockM * kPPitch];

  const RaggedParams& params = kernel_params.params;
  const RaggedAlignment aligned = kernel_params.aligned;
  const int thread = static_cast<int>(threadIdx.x);
  const int ty = thread / 16, tx = thread % 16;
  const int head_dim = params.head_dim;

  const TileSchedule schedule{params.rows, kBlockM};
  const std::int64_t work = schedule.num_ids() * params.num_q_heads;
  for (std::int64_t item = blockIdx.x; item < work; item += gridDim.x) {
    const std::int64_t id = schedule.num_ids() - 1 - item / params.num_q_heads;
    const int head = static_cast<int>(item % params.num_q_heads);
    const TileSchedule::Tile tile = schedule.tile(id);
    if (tile.row >= tile.length) continue;

    const int length = static_cast<int>(tile.length);  // under 2^31: the host refuses longer tensors
    const int first_row = static_cast<int>(tile.row);
    const int rows = min(kBlockM, length - first_row);
    const std::int64_t first_global = tile.begin + tile.row;

    float o[4][kColumnBlocks][4] = {};
    float maximum[4], sum[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      maximum[r] = -INFINITY;
      sum[r] = 0.0f;
    }

    if (params.rows.owned(tile.segment)) {
      const int kv_head = head / params.group();
      const float* q =
          static_cast<const float*>(params.q.data) + first_global * params.q.row_stride + head * params.q.head_stride;
      const float* k =
          static_cast<const float*>(params.k.data) + tile.begin * params.k.row_stride + kv_head * params.k.head_stride;
      const float* v =
          static_cast<const float*>(params.v.data) + tile.begin * params.v.row_stride + kv_head * params.v.head_stride;
      const int last_row = first_row + rows - 1;
      const int key_begin = params.mask.lo(first_row, length), key_end = params.mask.hi(last_row, length);
      const int full_begin = params.mask.lo(last_row, length), full_end = params.mask.hi(first_row, length);
      const float scale = params.scale * kLog2E;

      for (int key = key_begin; key < key_end; key += kBlockN) {
        float s[4][4] = {};
        for (int d = 0; d < head_dim; d += kKStep) {
          __syncthreads();
          for (int i = thread; i < kBlockM * (kKStep / 4); i += Tile::kThreads) {
            const int row = i / (kKStep / 4), column = i % (kKStep / 4) * 4;
            const bool inside = d + column < head_dim;
            *reinterpret_cast<float4*>(&s_q[row * kKPitch + column]) =
                load_four(q + row * params.q.row_stride + d + column, inside && row < rows, aligned.q);
            *reinterpret_cast<float4*>(&s_kv[row * kKPitch + column]) =
                load_four(k + (key + row) * params.k.row_stride + d + column, inside && key + row < length, aligned.k);
          }
          __syncthreads();
#pragma unroll
          for (int column = 0; column < kKStep; column += 4) {
            float4 a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              a[i] = *reinterpret_cast<const float4*>(&s_q[(ty * 4 + i) * kKPitch + column]);
              b[i] = *reinterpret_cast<const float4*>(&s_kv[(tx + 16 * i) * kKPitch + column]);
            }
#pragma unroll
            for (int r = 0; r < 4; ++r) {
#pragma unroll
              for (int c = 0; c < 4; ++c) {
                s[r][c] = fmaf(a[r].x, b[c].x, s[r][c]);
                s[r][c] = fmaf(a[r].y, b[c].y, s[r][c]);
                s[r][c] = fmaf(a[r].z, b[c].z, s[r][c]);
                s[r][c] = fmaf(a[r].w, b[c].w, s[r][c]);
              }
            }
          }
        }

        const bool edge = key < full_begin || key + kBlockN > full_end;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int row = min(first_row + ty * 4 + r, length - 1);
          const int lo = edge ? params.mask.lo(row, length) : key;
          const int hi = edge ? params.mask.hi(row, length) : key + kBlockN;
          float largest = -INFINITY;
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int j = key + tx + 16 * c;
            s[r][c] = j >= lo && j < hi ? s[r][c] * scale : -INFINITY;
            largest = fmaxf(largest, s[r][c]);
          }
#pragma unroll
          for (int step = 1; step < 16; step *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
          largest = fmaxf(maximum[r], largest);
          const float reference = largest == -INFINITY ? 0.0f : largest;  // never -inf - -inf
          const float rescale = exp2_approximate(maximum[r] - reference);
          maximum[r] = largest;
          float total = 0.0f;
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const float p = exp2_approximate(s[r][c] - reference);
            total += p;
            s_p[(ty * 4 + r) * kPPitch + tx + 16 * c] = p;
          }
          sum[r] = sum[r] * rescale + total;
#pragma unroll
          for (int b = 0; b < kColumnBlocks; ++b) {
#pragma unroll
            for (int c = 0; c < 4; ++c) o[r][b][c] *= rescale;
          }
        }

#pragma unroll
        for (int b = 0; b < kColumnBlocks; ++b) {
          __syncthreads();  // s_kv is free; on the first pass s_p is whole
          for (int i = thread; i < kBlockN * (kVStep / 4); i += Tile::kThreads) {
            const int row = i / (kVStep / 4), column = i % (kVStep / 4) * 4;
            *reinterpret_cast<float4*>(&s_kv[row * kVPitch + column]) =
                load_four(v + (key + row) * params.v.row_stride + b * kVStep + column,
                          b * kVStep + column < head_dim && key + row < length, aligned.v);
          }
          __syncthreads();
#pragma unroll 4
          for (int j = 0; j < kBlockN; j += 4) {
            float4 value[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) value[i] = *reinterpret_cast<const float4*>(&s_kv[(j + i) * kVPitch + tx * 4]);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              const float4 p = *reinterpret_cast<const float4*>(&s_p[(ty * 4 + r) * kPPitch + j]);
              const float weight[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                o[r][b][0] = fmaf(weight[i], value[i].x, o[r][b][0]);
                o[r][b][1] = fmaf(weight[i], value[i].y, o[r][b][1]);
                o[r][b][2] = fmaf(weight[i], value[i].z, o[r][b][2]);
                o[r][b][3] = fmaf(weight[i], value[i].w, o[r][b][3]);
              }
            }
          }
        }
        __syncthreads();  // s_p and s_kv are free for the next tile
      }
    }

    float* out = static_cast<float*>(params.out) + first_global * params.out_row_stride + head * params.out_head_stride;
    float* lse = params.lse == nullptr
                     ? nullptr
                     : params.lse + first_global * params.lse_row_stride + head * params.lse_head_stride;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = ty * 4 + r;
#pragma unroll
      for (int step = 1; step < 16; step *= 2) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], step);
      if (row >= rows) continue;
      const float inverse = inverse_of_sum(sum[r]);
      if (lse != nullptr && tx == 0) lse[row * params.lse_row_stride] = natural_lse(maximum[r], sum[r]);
#pragma unroll
      for (int b = 0; b < kColumnBlocks; ++b) {
        const int column = b * kVStep + tx * 4;
        if (column >= head_dim) continue;
        float* target = out + row * params.out_row_stride + column;
        const float4 result =
            make_float4(o[r][b][0] * inverse, o[r][b][1] * inverse, o[r][b][2] * inverse, o[r][b][3] * inverse);
        if (aligned.out) {
          *reinterpret_cast<float4*>(target) = result;
        } else {
          target[0] = result.x;
          target[1] = result.y;
          target[2] = result.z;
          target[3] = result.w;
        }
      }
    }
  }
}

template <int kHeadDim>
void launch_ragged_fp32(const RaggedKernelParams& params, int device, StreamHandle stream) {
  const TileSchedule schedule{params.params.rows, RaggedTileFp32::kBlockM};
  launch<ragged_fp32_kernel<kHeadDim>>(params, schedule.num_ids() * params.params.num_q_heads, RaggedTileFp32::kThreads,
                                       0, device, static_cast<cudaStream_t>(stream),
                                       "launching ragged_flash_attention");
}

}  // namespace ragged_attention::portable
