// One query row and one kv head of sparse attention: all query heads of the group over the tokens of the row's list, in
// float32.
//
// Schedule. The driver has resolved the list into offsets. The group's queries are converted once. Per block of
// kQsaBlockKeys tokens,
//   1. S = scale * Q K^T as dot products along head_dim, K read where it lies (a token serves too few multiplications
//   to
//      pay for a transposition): register tiles of up to 4 heads times 3 tokens; lanes are added up at the end.
//   2. Online softmax of each head's scores, S becoming the weights P.
//   3. V is packed in panels of columns; O = factor * O + P V in register tiles of kHeadsPv heads times kVecsPv
//   vectors.
// V of the block and K of the next one are asked for (prefetched) a step ahead.
// Finally O is divided by the sums and rounded.
//
// Included by one file per instruction set, which defines RAGGED_ATTENTION_KERNEL as the kernel's name.

#include "common/cpu/vec.h"
#include "qsa_sparse_attention/cpu/kernel.h"

namespace ragged_attention {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kHeadsPv = 6, kVecsPv = 4;  // 24 + 4 + 1 of 32 registers
#else
constexpr int kHeadsPv = 6, kVecsPv = 2;  // 12 + 2 + 1 of 16 registers
#endif
constexpr int kStride = kQsaBlockKeys;  // of S
constexpr int kHeadsQk = 4;

RAGGED_ATTENTION_INLINE int min(int a, int b) { return a < b ? a : b; }

// Tokens per register tile of kHeads dot products each: about 12 accumulators, enough to hide the latency of an FMA.
constexpr int tokens_per_tile(int heads) { return heads == 1 ? 8 : heads == 2 ? 5 : heads == 3 ? 4 : 3; }

// S[kHeads][kTokens] for tokens whose K lie at k + offsets[0..kTokens). q is [kHeads][padded_dim], filled up with
// zeros.
template <int kHeads, int kTokens, typename Element>
RAGGED_ATTENTION_INLINE void dot_tile(Element, const float* q, const typename Element::Type* k, const int64_t* offsets,
                                      int head_dim, int padded_dim, float scale, float* s) {
  Vec acc[kHeads][kTokens];
  const typename Element::Type* row[kTokens];
  for (int t = 0; t < kTokens; ++t) row[t] = k + offsets[t];
  for (int h = 0; h < kHeads; ++h) {
    for (int t = 0; t < kTokens; ++t) acc[h][t] = Vec{};
  }
  int d = 0;
  for (; d + kWidth <= head_dim; d += kWidth) {
    Vec b[kTokens];
    for (int t = 0; t < kTokens; ++t) b[t] = load_as_float(Element(), row[t] + d);
    for (int h = 0; h < kHeads; ++h) {
      const Vec a = load(q + h * padded_dim + d);
      for (int t = 0; t < kTokens; ++t) acc[h][t] = multiply_add(a, b[t], acc[h][t]);
    }
  }
  if (d < head_dim) {
    for (int t = 0; t < kTokens; ++t) {
      const Vec b = load_as_float_partial(Element(), row[t] + d, head_dim - d);
      for (int h = 0; h < kHeads; ++h) acc[h][t] = multiply_add(load(q + h * padded_dim + d), b, acc[h][t]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int t = 0; t < kTokens; ++t) s[h * kStride + t] = reduce_add(acc[h][t]) * scale;
  }
}

template <int kHeads, typename Element>
void dot_block(Element, const float* q, const typename Element::Type* k, const int64_t* offsets, int tokens,
               int head_dim, int padded_dim, float scale, float* s) {
  constexpr int kTokens = tokens_per_tile(kHeads);
  int t = 0;
  for (; t + kTokens <= tokens; t += kTokens) {
    dot_tile<kHeads, kTokens>(Element(), q, k, offsets + t, head_dim, padded_dim, scale, s + t);
  }
  for (; t < tokens; ++t) dot_tile<kHeads, 1>(Element(), q, k, offsets + t, head_dim, padded_dim, scale, s + t);
}

template <typename Element>
RAGGED_ATTENTION_INLINE void dot_heads(Element, int heads, const float* q, const typename Element::Type* k,
                                       const int64_t* offsets, int tokens, int head_dim, int padded_dim, float scale,
                                       float* s) {
  switch (heads) {
    case 1:
      return dot_block<1>(Element(), q, k, offsets, tokens, head_dim, padded_dim, scale, s);
    case 2:
      return dot_block<2>(Element(), q, k, offsets, tokens, head_dim, padded_dim, scale, s);
    case 3:
      return dot_block<3>(Element(), q, k, offsets, tokens, head_dim, padded_dim, scale, s);
    default:
      return dot_block<4>(Element(), q, k, offsets, tokens, head_dim, padded_dim, scale, s);
  }
}

// V of a block as panels of kVecsPv vectors of columns, then of single vectors: [columns][tokens][panel width], panels
// kQsaBlockKeys rows apart. Read where they lie, the same columns of all tokens would fall into a few sets of the L1
// cache.
template <typename Element>
void pack_v(Element, const typename Element::Type* v, const int64_t* offsets, int tokens, int head_dim, float* packed) {
  for (int t = 0; t < tokens; ++t) {
    const typename Element::Type* const row = v + offsets[t];
    int d = 0;
    for (; d + kVecsPv * kWidth <= head_dim; d += kVecsPv * kWidth) {
      float* const to = packed + d * kQsaBlockKeys + t * kVecsPv * kWidth;
      for (int c = 0; c < kVecsPv; ++c) store(to + c * kWidth, load_as_float(Element(), row + d + c * kWidth));
    }
    for (; d < head_dim; d += kWidth) {
      store(packed + d * kQsaBlockKeys + t * kWidth, d + kWidth <= head_dim
                                                         ? load_as_float(Element(), row + d)
                                                         : load_as_float_partial(Element(), row + d, head_dim - d));
    }
  }
}

// O[kHeads][kVecs * kWidth] = factor * O + P V for one panel of V.
template <int kHeads, int kVecs>
void accumulate_tile(const float* p, const float* v, int tokens, const float* factor, float* o, int o_stride) {
  Vec acc[kHeads][kVecs];
  for (int h = 0; h < kHeads; ++h) {
    const Vec f = splat(factor[h]);
    for (int c = 0; c < kVecs; ++c) acc[h][c] = load(o + h * o_stride + c * kWidth) * f;
  }
  for (int t = 0; t < tokens; ++t) {
    Vec b[kVecs];
    for (int c = 0; c < kVecs; ++c) b[c] = load(v + c * kWidth);
    for (int h = 0; h < kHeads; ++h) {
      const Vec a = splat(p[h * kStride + t]);
      for (int c = 0; c < kVecs; ++c) acc[h][c] = multiply_add(a, b[c], acc[h][c]);
    }
    v += kVecs * kWidth;
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int c = 0; c < kVecs; ++c) store(o + h * o_stride + c * kWidth, acc[h][c]);
  }
}

template <int kHeads>
void accumulate_block(const float* p, const float* v, int tokens, const float* factor, float* o, int head_dim,
                      int padded_dim) {
  int d = 0;
  for (; d + kVecsPv * kWidth <= head_dim; d += kVecsPv * kWidth) {
    accumulate_tile<kHeads, kVecsPv>(p, v + d * kQsaBlockKeys, tokens, factor, o + d, padded_dim);
  }
  for (; d < head_dim; d += kWidth) {
    accumulate_tile<kHeads, 1>(p, v + d * kQsaBlockKeys, tokens, factor, o + d, padded_dim);
  }
}

RAGGED_ATTENTION_INLINE void accumulate_heads(int heads, const float* p, const float* v, int tokens,
                                              const float* factor, float* o, int head_dim, int padded_dim) {
  static_assert(kHeadsPv == 6, "one case per number of heads");
  switch (heads) {
    case 1:
      return accumulate_block<1>(p, v, tokens, factor, o, head_dim, padded_dim);
    case 2:
      return accumulate_block<2>(p, v, tokens, factor, o, head_dim, padded_dim);
    case 3:
      return accumulate_block<3>(p, v, tokens, factor, o, head_dim, padded_dim);
    case 4:
      return accumulate_block<4>(p, v, tokens, factor, o, head_dim, padded_dim);
    case 5:
      return accumulate_block<5>(p, v, tokens, factor, o, head_dim, padded_dim);
    default:
      return accumulate_block<6>(p, v, tokens, factor, o, head_dim, padded_dim);
  }
}

template <typename Element>
void run_row(Element, const QsaRow& row) {
  using Type = typename Element::Type;
  const int head_dim = row.head_dim;
  const int padded_dim = (head_dim + kWidth - 1) / kWidth * kWidth;
  const int heads = row.num_heads;

  float* const q = row.workspace;
  float* const o = q + heads * padded_dim;
  float* const s = o + heads * padded_dim;
  float* const packed_v = s + heads * kStride;
  float* const factor = packed_v + kQsaBlockKeys * padded_dim;
  SoftmaxState* const state = reinterpret_cast<SoftmaxState*>(factor + heads);

  for (int h = 0; h < heads; ++h) {
    load_row(Element(), static_cast<const Type*>(row.q) + h * row.q_head_stride, head_dim, q + h * padded_dim,
             padded_dim);
    state[h] = {-kInfinity, 0.0f};
  }
  for (int i = 0; i < heads * padded_dim; i += kWidth) store(o + i, Vec{});

  const Type* const k = static_cast<const Type*>(row.k);
  const Type* const v = static_cast<const Type*>(row.v);
  for (int64_t first = 0; first < row.num_tokens; first += kQsaBlockKeys) {
    const int tokens =
        row.num_tokens - first < kQsaBlockKeys ? static_cast<int>(row.num_tokens - first) : kQsaBlockKeys;
    const int64_t* const offsets = row.offsets + first;
    // The first heads bring K in; the other rows are asked for before they are needed, since tokens lie anywhere.
    for (int t = 0; t < tokens; ++t) prefetch_row(Element(), v + offsets[t], head_dim);
    for (int h = 0; h < heads; h += kHeadsQk) {
      dot_heads(Element(), min(kHeadsQk, heads - h), q + h * padded_dim, k, offsets, tokens, head_dim, padded_dim,
                row.scale_log2, s + h * kStride);
    }
    for (int h = 0; h < heads; ++h) factor[h] = softmax_update(s + h * kStride, 0, tokens, state[h]);
    for (int64_t t = first + tokens; t < row.num_tokens && t < first + 2 * kQsaBlockKeys; ++t) {
      prefetch_row(Element(), k + row.offsets[t], head_dim);
    }
    pack_v(Element(), v, offsets, tokens, head_dim, packed_v);
    for (int h = 0; h < heads; h += kHeadsPv) {
      accumulate_heads(min(kHeadsPv, heads - h), s + h * kStride, packed_v, tokens, factor + h, o + h * padded_dim,
                       head_dim, padded_dim);
    }
  }

  const int out_bytes = row.out_element == CpuElement::kFloat32 ? 4 : 2;
  for (int h = 0; h < heads; ++h) {
    void* const to = static_cast<char*>(row.out) + h * row.out_head_stride * out_bytes;
    if (softmax_empty(state[h])) {
      __builtin_memset(to, 0, static_cast<size_t>(head_dim) * static_cast<size_t>(out_bytes));
    } else {
      store_row(row.out_element, to, head_dim, o + h * padded_dim, 1.0f / state[h].sum);
    }
    if (row.lse != nullptr) row.lse[h * row.lse_head_stride] = softmax_lse(state[h]);
  }
}

}  // namespace

void RAGGED_ATTENTION_KERNEL(const QsaRow& row) {
  switch (row.element) {
    case CpuElement::kFloat32:
      return run_row(Float32(), row);
    case CpuElement::kFloat16:
      return run_row(Float16(), row);
    case CpuElement::kBFloat16:
      return run_row(BFloat16(), row);
  }
}

}  // namespace ragged_attention
