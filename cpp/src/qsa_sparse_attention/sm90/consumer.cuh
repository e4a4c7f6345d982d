// The consumer warpgroup: attention of a group's 64 rows (query heads of its rows) over the tiles that arrive.
//
// Row i of the product is query head i % heads of the group's row i / heads. A row does not list every token of a tile:
// what it does not list gets the score -inf, so its weight is 0. But 0 * NaN is NaN: where a result is not finite after
// the first pass, the group is done once more, and the values that are not finite are left out of the products and
// added to the rows that list them by hand.
#pragma once

#include "common/cuda/softmax_math.cuh"
#include "qsa_sparse_attention/cuda/results.cuh"
#include "qsa_sparse_attention/sm90/params.cuh"
#include "ragged_flash_attention/sm90/softmax.cuh"

namespace ragged_attention::sm90 {

template <typename Traits>
struct QsaConsumer {
  using Element = typename Traits::Element;
  static constexpr int kKeys = Traits::kKeys, kHeadDim = Traits::kHeadDim, kMaskWords = Traits::kMaskWords;

  const QsaGroupsParams& params;
  QsaShared<Traits>& shared;
  Ring<1> k_ring, v_ring;
  const QsaUnit& unit;

  int group_row[2];          // of this thread's two rows of the product; -1: none
  float maximum[2], sum[2];  // of the scaled scores, in units of log2; this thread's part of the sum
  // In parts of kColumns columns: a product may not have more registers than a thread gets at the launch.
  static constexpr int kColumns = kHeadDim < 128 ? kHeadDim : 128;
  float output[kHeadDim / kColumns][kColumns / 2];

  __device__ __forceinline__ QsaConsumer(const QsaGroupsParams& params_, QsaShared<Traits>& shared_)
      : params(params_), shared(shared_), unit(shared_.unit[kConsumes]) {}

  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32 % 4; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x) % 128; }
  __device__ __forceinline__ static int product_row(int r) { return 16 * warp() + lane() / 4 + 8 * r; }
  __device__ __forceinline__ const QsaParams& call() const { return params.call.params; }

  __device__ __forceinline__ void start() {
    const int heads = call().group();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = product_row(r) / heads;
      group_row[r] = row < unit.group.rows ? row : -1;
    }
    load_q();
  }

  // Rows of the product that are none of the group's are left as they are: no weight of theirs is ever other than 0.
  __device__ __forceinline__ void load_q() {
    constexpr int kChunks = kHeadDim / 8;
    const int heads = call().group();
    const int rows = unit.group.owned ? unit.group.rows * heads : 0;
    for (int i = thread(); i < rows * kChunks; i += 128) {
      const int row = i / kChunks, chunk = i % kChunks;
      const std::int64_t from = (unit.group.begin + row / heads) * call().q_row_stride +
                                (unit.kv_head * heads + row % heads) * call().q_head_stride + chunk * 8;
      copy_16(shared_address(shared.q) + chunk_offset<64>(row, chunk), static_cast<const Element*>(call().q) + from);
    }
  }

  __device__ __forceinline__ void wait_for_q() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    cutlass::arch::fence_view_async_shared();
    consumers_sync();
  }

  template <bool kCareful>
  __device__ __forceinline__ void pass() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = -INFINITY;
      sum[r] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) o(i) = 0.0f;
#pragma unroll 1
    while (step<kCareful>()) {
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = quad_sum(sum[r]);
  }

  // Whether a result of one of the group's rows is not finite.
  __device__ __forceinline__ bool special() {
    float zero[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) zero[i / 2 % 2] = __fmaf_rn(o(i), 0.0f, zero[i / 2 % 2]);
    return (group_row[0] >= 0 && zero[0] != 0.0f) || (group_row[1] >= 0 && zero[1] != 0.0f);
  }

  // The whole rows, from this CTA alone.
  __device__ __forceinline__ void store() {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) inverse[r] = sum[r] == 0.0f ? 0.0f : 1.0f / sum[r];
    scale_output(inverse);
    switch (params.call.out_type) {
      case portable::OutType::kFloat32:
        return store_as<float>();
      case portable::OutType::kFloat16:
        return store_as<cutlass::half_t>();
      case portable::OutType::kBFloat16:
        return store_as<cutlass::bfloat16_t>();
    }
  }

  // For the others of the cluster.
  __device__ __forceinline__ void store_partial() {
    consumers_sync();  // every warp's products have read what lies there
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (group_row[r] < 0) continue;
      const int row = product_row(r);
      if (lane() % 4 == 0) {
        shared.partial_maximum()[row] = maximum[r];
        shared.partial_sum()[row] = sum[r];
      }
      float* to = shared.partial_output() + row * QsaShared<Traits>::kPartialStride + 2 * (lane() % 4);
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        *reinterpret_cast<float2*>(to + 8 * i) = make_float2(o(4 * i + 2 * r), o(4 * i + 2 * r + 1));
      }
    }
  }

 private:
  __device__ __forceinline__ float& o(int i) { return output[i / (kColumns / 2)][i % (kColumns / 2)]; }
  __device__ __forceinline__ void pin_output() {
#pragma unroll
    for (auto& part : output) pin(part);
  }
  __device__ __forceinline__ void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (auto& part : output) scale_rows(part, factor);
  }

  // One tile; false where the pass has ended.
  template <bool kCareful>
  __device__ __forceinline__ bool step() {
    Barrier::wait(&shared.k_full, k_ring.full_parity());
    k_ring.advance();
    if (shared.end != 0) {
      release(shared.k_empty);
      return false;
    }
    cutlass::arch::fence_view_async_shared();
    // Not members: they need no registers from one tile to the next.
    float scores[kKeys / 2];
    std::uint32_t probabilities[kKeys / 4];  // pairs
    issue_scores(scores);
    wgmma_wait<0>();
    pin(scores);
    std::uint32_t listed[2][kMaskWords];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int w = 0; w < kMaskWords; ++w) listed[r][w] = group_row[r] < 0 ? 0 : shared.listed[group_row[r]][w];
    }
    release(shared.k_empty);
    update(scores, listed);
    pack_all<Element>(scores, probabilities);
    Barrier::wait(&shared.v_full, v_ring.full_parity());
    v_ring.advance();
    if constexpr (kCareful) add_special(probabilities, listed);
    cutlass::arch::fence_view_async_shared();
    issue_output(probabilities);
    wgmma_wait<0>();
    pin_output();
    pin(probabilities);
    release(shared.v_empty);
    return true;
  }

  __device__ __forceinline__ void release(std::uint64_t& empty) {
    __syncwarp();
    if (lane() == 0) Barrier::arrive(&empty);
  }

  __device__ __forceinline__ void issue_scores(float (&scores)[kKeys / 2]) {
    const std::uint64_t q = descriptor_k_major(shared_address(shared.q));
    const std::uint64_t k = descriptor_k_major(shared_address(shared.k));
    pin(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const std::uint64_t in_block = descriptor_step(step % 4 * 32);
      wgmma_shared<Element, kKeys>(scores, q + in_block + step / 4 * descriptor_step(sizeof(shared.q[0])),
                                   k + in_block + step / 4 * descriptor_step(sizeof(shared.k[0])), step > 0);
    }
    wgmma_commit();
    pin(scores);
  }

  __device__ __forceinline__ void issue_output(std::uint32_t (&probabilities)[kKeys / 4]) {
    const std::uint64_t v = descriptor_across_k(shared_address(shared.v), sizeof(shared.v[0]));
    pin_output();
    pin(probabilities);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int part = 0; part < kHeadDim / kColumns; ++part) {
        wgmma_registers<Element, kColumns>(output[part], &probabilities[4 * step],
                                           v + step * descriptor_step(16 * kBlockRowBytes) +
                                               part * (kColumns / kBlockColumns) * descriptor_step(sizeof(shared.v[0])),
                                           true);
      }
    }
    wgmma_commit();
    pin_output();
  }

  // Scores become weights, `output` and `sum` terms of the new maximum. Scaled before the maximum is subtracted: scores
  // of any size and a scale of any sign come out right.
  __device__ __forceinline__ void update(float (&scores)[kKeys / 2], const std::uint32_t (&listed)[2][kMaskWords]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int w = 0; w < kMaskWords; ++w) {
        const std::uint32_t mine = listed[r][w] >> (lane() % 4 * 2);  // bits 8 j and 8 j + 1 are this thread's
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores[4 * (4 * w + j) + 2 * r + e];
            score = (mine >> (8 * j + e) & 1) != 0 ? score * params.scale_log2 : -INFINITY;
          }
        }
      }
    }
    float factor[2], offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = maximum[r], odd = -INFINITY;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        even = fmaxf(even, scores[4 * i + 2 * r]);
        odd = fmaxf(odd, scores[4 * i + 2 * r + 1]);
      }
      const float row = quad_max(fmaxf(even, odd));
      offset[r] = row == -INFINITY ? 0.0f : row;  // a row that has seen nothing yet: -inf - -inf would be NaN
      factor[r] = exp2_approximate(maximum[r] - offset[r]);
      maximum[r] = row;
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[4 * i + 2 * r + e];
          score = exp2_approximate(score - offset[r]);
          sums[e] += score;
        }
      }
      sum[r] = __fmaf_rn(sum[r], factor[r], sums[0] + sums[1]);
    }
    // A maximum that stays, as most do, gives a factor of exactly 1.
    if (__any_sync(0xffffffff, factor[0] != 1.0f || factor[1] != 1.0f)) scale_output(factor);
  }

  // --- The second pass's: values that are not finite are taken out of the tile, and added where they are listed.

  __device__ __forceinline__ static bool not_finite(std::uint32_t pair) {
    constexpr std::uint32_t kExponent = std::is_same_v<Element, cutlass::bfloat16_t> ? 0x7f80u : 0x7c00u;
    return (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
  }

  __device__ __forceinline__ void add_special(const std::uint32_t (&probabilities)[kKeys / 4],
                                              const std::uint32_t (&listed)[2][kMaskWords]) {
    constexpr int kChunks = kHeadDim / 8;
    char* tile = reinterpret_cast<char*>(&shared.v);
    if (thread() < kMaskWords) shared.special[thread()] = 0;
    consumers_sync();
    for (int i = thread(); i < kKeys * kChunks; i += 128) {
      const int token = i / kChunks, chunk = i % kChunks;
      const uint4 value = *reinterpret_cast<const uint4*>(tile + chunk_offset<kKeys>(token, chunk));
      if (not_finite(value.x) || not_finite(value.y) || not_finite(value.z) || not_finite(value.w)) {
        atomicOr(&shared.special[token / 32], 1u << token % 32);
      }
    }
    consumers_sync();
#pragma unroll 1
    for (int token = 0; token < kKeys; ++token) {
      if ((shared.special[token / 32] >> (token % 32) & 1) == 0) continue;
      if (thread() < kChunks) {
        uint4* at = reinterpret_cast<uint4*>(tile + chunk_offset<kKeys>(token, thread()));
        reinterpret_cast<uint4*>(shared.special_value)[thread()] = *at;
        *at = make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {  // pairs: columns 8 (i / 2) + 2 (lane % 4) and the next, row i % 2
        if (i / 2 * 4 + lane() % 4 == token / 2) {
          const std::uint32_t bits = token % 2 == 0 ? probabilities[i] : probabilities[i] >> 16;
          shared.special_weight[product_row(i % 2)] = Element::bitcast(static_cast<std::uint16_t>(bits));
        }
      }
      consumers_sync();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        bool lists = false;
#pragma unroll
        for (int w = 0; w < kMaskWords; ++w) lists |= token / 32 == w && (listed[r][w] >> (token % 32) & 1) != 0;
        if (!lists) continue;
        const float weight = static_cast<float>(shared.special_weight[product_row(r)]);
#pragma unroll
        for (int i = 0; i < kHeadDim / 8; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& sum_of_values = o(4 * i + 2 * r + e);
            sum_of_values =
                __fmaf_rn(weight, static_cast<float>(shared.special_value[8 * i + lane() % 4 * 2 + e]), sum_of_values);
          }
        }
      }
      consumers_sync();
    }
  }

  // --- Results

  template <typename Out>
  __device__ __forceinline__ void store_as() {
    const int heads = call().group();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (group_row[r] < 0) continue;
      const std::int64_t row = unit.group.begin + group_row[r];
      const std::int64_t head = unit.kv_head * heads + product_row(r) % heads;
      Out* to = static_cast<Out*>(call().out) + row * call().out_row_stride + head * call().out_head_stride +
                2 * (lane() % 4);
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        const float low = o(4 * i + 2 * r), high = o(4 * i + 2 * r + 1);
        if constexpr (std::is_same_v<Out, float>) {
          *reinterpret_cast<float2*>(to + 8 * i) = make_float2(low, high);
        } else {
          *reinterpret_cast<std::uint32_t*>(to + 8 * i) = pack<Out>(low, high);
        }
      }
      if (call().lse != nullptr && lane() % 4 == 0) {
        call().lse[row * call().lse_row_stride + head * call().lse_head_stride] = natural_lse(maximum[r], sum[r]);
      }
    }
  }
};

}  // namespace ragged_attention::sm90
