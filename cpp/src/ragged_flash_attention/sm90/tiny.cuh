// Sequences of a few tokens, one warp for all query heads of one kv head: m16n8k16 products on fragments that are
// loaded from global memory as they are needed, 16 bytes a thread, without shared memory.
//
// A thread has g = lane / 4 and t = lane % 4. Sums over k do not care in which order k is numbered, so long as both
// operands agree: a thread's 8 elements of a row at 32 c + 8 t are its parts of two k-steps, instead of the pairs at
// 2 t and 2 t + 8 that the product's own numbering asks for. Columns of V may be renumbered likewise: column n = g of
// product j is 64 c + 8 g + j, so that its 8 elements come with one load, and the 16 of a row that a thread gets are
// neighbours.
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm80.hpp>
#include <type_traits>

#include "ragged_flash_attention/sm90/params.cuh"
#include "ragged_flash_attention/sm90/softmax.cuh"

namespace ragged_attention::sm90 {

template <typename Element>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                            std::uint32_t b1) {
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                                              c[3]);
  } else {
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                                            c[3]);
  }
}

// A pair of elements.
template <typename Element>
__device__ __forceinline__ float2 unpack(std::uint32_t pair) {
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
}

template <typename Element, int kHeadDim>
struct TinySequence {
  static constexpr int kKeys = 16;                        // the most tokens
  static constexpr int kQkChunks = (kHeadDim + 31) / 32;  // of 32 columns
  static constexpr int kPvChunks = (kHeadDim + 63) / 64;  // of 64
  // Whether a sequence's keys and values stay in registers, loaded all at once; if not, they are loaded as they are
  // needed.
  static constexpr bool kHolds = kHeadDim <= 128;

  struct Chunk {  // 8 elements
    std::uint32_t words[4];
  };

  const RaggedKernelParams& params;
  int g, t;  // of the lane

  __device__ explicit TinySequence(const RaggedKernelParams& params_)
      : params(params_), g(static_cast<int>(threadIdx.x) % 32 / 4), t(static_cast<int>(threadIdx.x) % 4) {}

  __device__ __forceinline__ static Chunk load(const RaggedTensor& tensor, std::int64_t row, int head, int column,
                                               bool valid) {
    Chunk chunk = {};
    if (valid) {
      const auto* from =
          static_cast<const Element*>(tensor.data) + row * tensor.row_stride + head * tensor.head_stride + column;
      const uint4 words = __ldg(reinterpret_cast<const uint4*>(from));
      chunk = {words.x, words.y, words.z, words.w};
    }
    return chunk;
  }

  // The thread's part of chunk c of key 8 j + g.
  __device__ __forceinline__ Chunk load_key(std::int64_t begin, int length, int kv_head, int j, int c) const {
    const int key = 8 * j + g, column = 32 * c + 8 * t;
    return load(params.k_rows, begin + key, kv_head, column, key < length && column < params.head_dim);
  }

  // Of a row of Q.
  __device__ __forceinline__ Chunk load_query(std::int64_t row, int head, int c, bool valid) const {
    const int column = 32 * c + 8 * t;
    return load(params.q_rows, row, head, column, valid && column < params.head_dim);
  }

  // And of the j-th of its four rows of V.
  __device__ __forceinline__ Chunk load_value(std::int64_t begin, int length, int kv_head, int j, int c) const {
    const int key = 2 * t + j % 2 + j / 2 * 8, column = 64 * c + 8 * g;
    return load(params.v_rows, begin + key, kv_head, column, key < length && column < params.head_dim);
  }

  // A sequence of one token: its values, for every finite score. A few lanes for each kv head, of which the warp takes
  // several.
  static constexpr int kTokenLanes = kHeadDim <= 64 ? 8 : (kHeadDim <= 128 ? 16 : 32);  // 8 elements each
  static constexpr int kTokenHeads = 32 / kTokenLanes;
  static constexpr int kQueries = 4;  // query heads at once

  struct Token {
    std::int64_t row;
    int head;  // of k and v
    bool valid;
    Chunk key, value, queries[kQueries];
  };

  __device__ __forceinline__ static int token_column() { return 8 * (static_cast<int>(threadIdx.x) % kTokenLanes); }

  // Its first query heads; `wanted` is the same in all lanes.
  __device__ __forceinline__ Token load_token(std::int64_t row, int first_head, int kv_heads, bool wanted) const {
    Token token;
    token.row = row;
    token.head = first_head + static_cast<int>(threadIdx.x) % 32 / kTokenLanes;
    token.valid = wanted && token.head < kv_heads && token_column() < params.head_dim;
    token.key = load(params.k_rows, row, token.head, token_column(), token.valid);
    token.value = load(params.v_rows, row, token.head, token_column(), token.valid);
    load_queries(token, 0);
    return token;
  }

  __device__ __forceinline__ void load_queries(Token& token, int first) const {
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      token.queries[i] = load(params.q_rows, token.row, token.head * params.group + first + i, token_column(),
                              token.valid && first + i < params.group);
    }
  }

  __device__ __forceinline__ void attend_token(Token& token) const {
#pragma unroll 1
    for (int first = 0; first < params.group; first += kQueries) {
      if (first > 0) load_queries(token, first);
      float scores[kQueries] = {};
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const float2 a = unpack<Element>(token.queries[i].words[word]), b = unpack<Element>(token.key.words[word]);
          scores[i] = __fmaf_rn(a.y, b.y, __fmaf_rn(a.x, b.x, scores[i]));
        }
      }
#pragma unroll
      for (int distance = 1; distance < kTokenLanes; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kQueries; ++i) scores[i] += __shfl_xor_sync(0xffffffff, scores[i], distance);
      }
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        if (!token.valid || first + i >= params.group) continue;
        const int q_head = token.head * params.group + first + i;
        OnlineSoftmax softmax(params.scale_log2);
        const float weight = softmax.of_one(scores[i]);
        Chunk out;
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const float2 v = unpack<Element>(token.value.words[word]);
          out.words[word] = pack<Element>(v.x * weight, v.y * weight);
        }
        auto* to = static_cast<Element*>(params.out_data) + token.row * params.out_row_stride +
                   q_head * params.out_head_stride + token_column();
        *reinterpret_cast<uint4*>(to) = {out.words[0], out.words[1], out.words[2], out.words[3]};
        if (params.lse != nullptr && token_column() == 0) {
          params.lse[token.row * params.lse_row_stride + q_head * params.lse_head_stride] = softmax.lse(0);
        }
      }
    }
  }

  // Rows are (token, head of the group), 16 of them at a time.
  __device__ __forceinline__ void run(std::int64_t begin, int length, int kv_head) const {
    Chunk keys[2][kHolds ? kQkChunks : 1], values[4][kHolds ? kPvChunks : 1];
    if constexpr (kHolds) {
#pragma unroll
      for (int c = 0; c < kQkChunks; ++c) {
#pragma unroll
        for (int j = 0; j < 2; ++j) keys[j][c] = load_key(begin, length, kv_head, j, c);
      }
#pragma unroll
      for (int c = 0; c < kPvChunks; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j][c] = load_value(begin, length, kv_head, j, c);
      }
    }
    const int rows = length * params.group;
#pragma unroll 1
    for (int first = 0; first < rows; first += 16) attend(begin, length, kv_head, rows, first, keys, values);
  }

  __device__ __forceinline__ void attend(std::int64_t begin, int length, int kv_head, int rows, int first,
                                         const Chunk (&keys)[2][kHolds ? kQkChunks : 1],
                                         const Chunk (&values)[4][kHolds ? kPvChunks : 1]) const {
    int token[2], head[2];
    bool valid[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + g + 8 * r;
      valid[r] = row < rows;
      token[r] = min(row / params.group, length - 1);
      head[r] = kv_head * params.group + row % params.group;
    }
    Chunk q[2][kHolds ? kQkChunks : 1];
    if constexpr (kHolds) {
#pragma unroll
      for (int c = 0; c < kQkChunks; ++c) {
#pragma unroll
        for (int r = 0; r < 2; ++r) q[r][c] = load_query(begin + token[r], head[r], c, valid[r]);
      }
    }
    float scores[2][4] = {};
#pragma unroll
    for (int c = 0; c < kQkChunks; ++c) {
      Chunk a[2], b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[i] = kHolds ? q[i][kHolds ? c : 0] : load_query(begin + token[i], head[i], c, valid[i]);
        b[i] = kHolds ? keys[i][kHolds ? c : 0] : load_key(begin, length, kv_head, i, c);
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const std::uint32_t rows_a[4] = {a[0].words[2 * step], a[1].words[2 * step], a[0].words[2 * step + 1],
                                         a[1].words[2 * step + 1]};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          mma_16x8x16<Element>(scores[j], rows_a, b[j].words[2 * step], b[j].words[2 * step + 1]);
        }
      }
    }
    // As a warpgroup's accumulator has them: element 4 j + 2 r + e is row g + 8 r, key 8 j + 2 t + e.
    float flat[8] = {scores[0][0], scores[0][1], scores[0][2], scores[0][3],
                     scores[1][0], scores[1][1], scores[1][2], scores[1][3]};
    int lo[2], hi[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lo[r] = params.mask.lo(token[r], length) - 2 * t;
      hi[r] = params.mask.hi(token[r], length) - 2 * t;
    }
    mask_rows(flat, lo, hi);
    OnlineSoftmax softmax(params.scale_log2);
    float factor[2];
    softmax.update<false>(flat, factor);
    softmax.finish();
    std::uint32_t p[4];
    pack_all<Element>(flat, p);
    const float inverse[2] = {softmax.inverse(0), softmax.inverse(1)};
#pragma unroll
    for (int c = 0; c < kPvChunks; ++c) {
      Chunk v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = kHolds ? values[j][kHolds ? c : 0] : load_value(begin, length, kv_head, j, c);
      float out[8][4] = {};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned half = j % 2 == 0 ? 0x5410 : 0x7632;  // element j of two keys, side by side
        mma_16x8x16<Element>(out[j], p, __byte_perm(v[0].words[j / 2], v[1].words[j / 2], half),
                             __byte_perm(v[2].words[j / 2], v[3].words[j / 2], half));
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!valid[r]) continue;
        auto* to = static_cast<Element*>(params.out_data) + (begin + token[r]) * params.out_row_stride +
                   head[r] * params.out_head_stride;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 64 * c + 16 * t + 8 * e;
          if (column >= params.head_dim) continue;
          uint4 words;
          words.x = pack<Element>(out[0][2 * r + e] * inverse[r], out[1][2 * r + e] * inverse[r]);
          words.y = pack<Element>(out[2][2 * r + e] * inverse[r], out[3][2 * r + e] * inverse[r]);
          words.z = pack<Element>(out[4][2 * r + e] * inverse[r], out[5][2 * r + e] * inverse[r]);
          words.w = pack<Element>(out[6][2 * r + e] * inverse[r], out[7][2 * r + e] * inverse[r]);
          *reinterpret_cast<uint4*>(to + column) = words;
        }
      }
    }
    if (params.lse != nullptr && t == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (valid[r]) {
          params.lse[(begin + token[r]) * params.lse_row_stride + head[r] * params.lse_head_stride] = softmax.lse(r);
        }
      }
    }
  }
};

}  // namespace ragged_attention::sm90
