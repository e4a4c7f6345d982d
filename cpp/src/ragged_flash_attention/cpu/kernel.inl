// One tile of flash attention: up to kMaxSubtiles times kSubtileRows query rows (positions times the heads of a group)
// against the keys that they see, in float32.
//
// Schedule. Q is packed once, in strips of kStripRows rows, element by element across the strip. Keys come in blocks
// counted from the sequence's first row, so that a row's arithmetic depends on nothing but its own sequence. Per block,
//   1. K is packed transposed, in panels of kPanel keys; V in panels of kPanel columns. Both stay in the L2 cache.
//   2. For every pass (kStripsPerPass strips of a subtile, whose scores S stay in the L1 cache; Q and O stream by):
//      S = scale * Q K^T, a kStripRows x kPanel register tile at a time, only where some row of the strip sees a key;
//      online softmax of each row over exactly the keys that it sees, S becoming the weights P;
//      O = factor * O + P V in register tiles of the same shape, over the keys that all rows of the strip see, and then
//      row by row over the few that only some see: a key that a row does not see is never multiplied with its weights.
// Finally O is divided by the row sums and rounded.
//
// Included by one file per instruction set, which defines RAGGED_ATTENTION_KERNEL as the kernel's name.

#include "common/cpu/vec.h"
#include "ragged_flash_attention/cpu/kernel.h"

namespace ragged_attention {
namespace {

// Register tile: kStripRows x kPanelVecs accumulators, kPanelVecs operands and a broadcast must fit the register file.
#if defined(__AVX512F__)
constexpr int kStripRows = 12, kPanelVecs = 2;  // 24 + 2 + 1 of 32
#elif defined(__aarch64__)
constexpr int kStripRows = 6, kPanelVecs = 4;  // 24 + 4 + 1 of 32
#else
constexpr int kStripRows = 6, kPanelVecs = 2;  // 12 + 2 + 1 of 16
#endif
constexpr int kPanel = kPanelVecs * kWidth;
constexpr int kStripsPerPass = kMaxPassRows / kStripRows;
constexpr int kPassRows = kStripsPerPass * kStripRows;
constexpr int kStride = kMaxBlockKeys;  // of S
constexpr int kPrefetchRows = 8;
static_assert(kSubtileRows % kStripRows == 0, "the tile's last strip must fit its Q and O");
static_assert(64 % kPanel == 0, "a block must be whole panels");

RAGGED_ATTENTION_INLINE int min(int a, int b) { return a < b ? a : b; }
RAGGED_ATTENTION_INLINE int max(int a, int b) { return a > b ? a : b; }

// S[kStripRows][kPanel] = scale * (Q of one strip) * (one panel of K^T). Rows past the strip's last are computed too,
// from zeros: one shape of code serves.
void multiply_qk(const float* q, const float* k, int head_dim, float scale, float* s) {
  Vec acc[kStripRows][kPanelVecs];
  for (int r = 0; r < kStripRows; ++r) {
    for (int c = 0; c < kPanelVecs; ++c) acc[r][c] = Vec{};
  }
  for (int d = 0; d < head_dim; ++d) {
    Vec b[kPanelVecs];
    for (int c = 0; c < kPanelVecs; ++c) b[c] = load(k + c * kWidth);
    for (int r = 0; r < kStripRows; ++r) {
      const Vec a = splat(q[r]);
      for (int c = 0; c < kPanelVecs; ++c) acc[r][c] = multiply_add(a, b[c], acc[r][c]);
    }
    q += kStripRows;
    k += kPanel;
  }
  const Vec factor = splat(scale);
  for (int r = 0; r < kStripRows; ++r) {
    for (int c = 0; c < kPanelVecs; ++c) store(s + r * kStride + c * kWidth, acc[r][c] * factor);
  }
}

// O[kRows][kVecs] = factor * O + P[:, begin:end) * V[begin:end) for one panel of V, whose rows are kVecs vectors long.
template <int kRows, int kVecs>
void multiply_pv(const float* p, const float* v, int begin, int end, const float* factor, float* o, int o_stride) {
  Vec acc[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    const Vec f = splat(factor[r]);
    for (int c = 0; c < kVecs; ++c) acc[r][c] = load(o + r * o_stride + c * kWidth) * f;
  }
  v += begin * (kVecs * kWidth);
  for (int j = begin; j < end; ++j) {
    Vec b[kVecs];
    for (int c = 0; c < kVecs; ++c) b[c] = load(v + c * kWidth);
    for (int r = 0; r < kRows; ++r) {
      const Vec a = splat(p[r * kStride + j]);
      for (int c = 0; c < kVecs; ++c) acc[r][c] = multiply_add(a, b[c], acc[r][c]);
    }
    v += kVecs * kWidth;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVecs; ++c) store(o + r * o_stride + c * kWidth, acc[r][c]);
  }
}

using MultiplyPv = void (*)(const float*, const float*, int, int, const float*, float*, int);

template <int kVecs>
RAGGED_ATTENTION_INLINE MultiplyPv multiply_pv_for_rows(int rows) {
  // A short strip's missing rows exist in P and O (padding), so a few shapes serve: 1, half a strip, a strip.
  if (rows == 1) return multiply_pv<1, kVecs>;
  if (rows <= kStripRows / 2) return multiply_pv<kStripRows / 2, kVecs>;
  return multiply_pv<kStripRows, kVecs>;
}

template <int kVecs = kPanelVecs>
RAGGED_ATTENTION_INLINE MultiplyPv multiply_pv_for(int rows, int vecs) {
  if constexpr (kVecs > 1) {
    if (vecs < kVecs) return multiply_pv_for<kVecs - 1>(rows, vecs);
  }
  return multiply_pv_for_rows<kVecs>(rows);
}

#if defined(__AVX2__)
// Transposes 8 x 8 floats held in eight registers and stores the result's rows `stride` floats apart.
RAGGED_ATTENTION_INLINE void store_transposed(const __m256 (&r)[8], float* to, int stride) {
  const __m256 a0 = _mm256_unpacklo_ps(r[0], r[1]), a1 = _mm256_unpackhi_ps(r[0], r[1]);
  const __m256 a2 = _mm256_unpacklo_ps(r[2], r[3]), a3 = _mm256_unpackhi_ps(r[2], r[3]);
  const __m256 a4 = _mm256_unpacklo_ps(r[4], r[5]), a5 = _mm256_unpackhi_ps(r[4], r[5]);
  const __m256 a6 = _mm256_unpacklo_ps(r[6], r[7]), a7 = _mm256_unpackhi_ps(r[6], r[7]);
  const __m256 b0 = _mm256_shuffle_ps(a0, a2, 0x44), b1 = _mm256_shuffle_ps(a0, a2, 0xee);
  const __m256 b2 = _mm256_shuffle_ps(a1, a3, 0x44), b3 = _mm256_shuffle_ps(a1, a3, 0xee);
  const __m256 b4 = _mm256_shuffle_ps(a4, a6, 0x44), b5 = _mm256_shuffle_ps(a4, a6, 0xee);
  const __m256 b6 = _mm256_shuffle_ps(a5, a7, 0x44), b7 = _mm256_shuffle_ps(a5, a7, 0xee);
  _mm256_storeu_ps(to + 0 * stride, _mm256_permute2f128_ps(b0, b4, 0x20));
  _mm256_storeu_ps(to + 1 * stride, _mm256_permute2f128_ps(b1, b5, 0x20));
  _mm256_storeu_ps(to + 2 * stride, _mm256_permute2f128_ps(b2, b6, 0x20));
  _mm256_storeu_ps(to + 3 * stride, _mm256_permute2f128_ps(b3, b7, 0x20));
  _mm256_storeu_ps(to + 4 * stride, _mm256_permute2f128_ps(b0, b4, 0x31));
  _mm256_storeu_ps(to + 5 * stride, _mm256_permute2f128_ps(b1, b5, 0x31));
  _mm256_storeu_ps(to + 6 * stride, _mm256_permute2f128_ps(b2, b6, 0x31));
  _mm256_storeu_ps(to + 7 * stride, _mm256_permute2f128_ps(b3, b7, 0x31));
}

RAGGED_ATTENTION_INLINE __m256 load8(Float32, const float* p) { return _mm256_loadu_ps(p); }
RAGGED_ATTENTION_INLINE __m256 load8(Float16, const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
RAGGED_ATTENTION_INLINE __m256 load8(BFloat16, const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
#endif

// K[0:keys) as panels [keys / kPanel][head_dim][kPanel]; the last panel is filled up with zeros. Reads no row past
// `keys`.
template <typename Element>
void pack_k(Element, const typename Element::Type* k, int64_t row_stride, int keys, int head_dim, float* packed) {
  for (int first = 0; first < keys; first += kPanel) {
    float* const panel = packed + first * head_dim;
    int j = 0;
#if defined(__AVX2__)
    for (; j + 8 <= kPanel && first + j < keys; j += 8) {
      const int rows = min(8, keys - first - j);
      for (int i = first + j + 8; i < min(first + j + 16, keys); ++i) {
        prefetch_row(Element(), k + i * row_stride, head_dim);
      }
      for (int d = 0; d < head_dim; d += 8) {
        __m256 r[8];
        if (rows == 8) {
          for (int i = 0; i < 8; ++i) r[i] = load8(Element(), k + (first + j + i) * row_stride + d);
        } else {
          for (int i = 0; i < 8; ++i) {
            r[i] = i < rows ? load8(Element(), k + (first + j + i) * row_stride + d) : _mm256_setzero_ps();
          }
        }
        store_transposed(r, panel + d * kPanel + j, kPanel);
      }
    }
    for (; j < kPanel; j += 8) {
      for (int d = 0; d < head_dim; ++d) _mm256_storeu_ps(panel + d * kPanel + j, _mm256_setzero_ps());
    }
#else
    for (; j < kPanel && first + j < keys; ++j) {
      const typename Element::Type* const row = k + (first + j) * row_stride;
      for (int d = 0; d < head_dim; ++d) panel[d * kPanel + j] = to_float(Element(), row[d]);
    }
    for (; j < kPanel; ++j) {
      for (int d = 0; d < head_dim; ++d) panel[d * kPanel + j] = 0.0f;
    }
#endif
  }
}

// V[0:keys) as panels [head_dim / kPanel][keys][kPanel]; the last panel is as many vectors wide as are left, `block`
// rows lie between panels.
template <typename Element>
void pack_v(Element, const typename Element::Type* v, int64_t row_stride, int keys, int head_dim, int block,
            float* packed) {
  const int vecs = (head_dim + kWidth - 1) / kWidth;
  for (int j = 0; j < keys; ++j) {
    const typename Element::Type* const row = v + j * row_stride;
    if (j + kPrefetchRows < keys) prefetch_row(Element(), row + kPrefetchRows * row_stride, head_dim);
    for (int first = 0; first < vecs; first += kPanelVecs) {
      const int width = min(kPanelVecs, vecs - first);
      float* const to = packed + first * kWidth * block + j * width * kWidth;
      for (int c = 0; c < width; ++c) {
        const int d = (first + c) * kWidth;
        store(to + c * kWidth, d + kWidth <= head_dim ? load_as_float(Element(), row + d)
                                                      : load_as_float_partial(Element(), row + d, head_dim - d));
      }
    }
  }
}

// The strips of a subtile of Q: [rows / kStripRows][head_dim][kStripRows], the last filled up with zeros. Row r is
// position first_position + r / num_heads, head r % num_heads.
template <typename Element>
void pack_q(Element, const RaggedTile& tile, int first_position, int rows, float* packed) {
  const typename Element::Type* const q = static_cast<const typename Element::Type*>(tile.q);
  const int head_dim = tile.head_dim;
  int position = first_position, head = 0;
  for (int r = 0; r < rows; ++r) {
    const typename Element::Type* const row = q + position * tile.q_row_stride + head * tile.q_head_stride;
    float* const to = packed + (r / kStripRows) * kStripRows * head_dim + r % kStripRows;
    if (position + kPrefetchRows < tile.num_rows) {
      prefetch_row(Element(), row + kPrefetchRows * tile.q_row_stride, head_dim);
    }
    for (int d = 0; d < head_dim; ++d) to[d * kStripRows] = to_float(Element(), row[d]);
    if (++head == tile.num_heads) head = 0, ++position;
  }
  for (int r = rows; r % kStripRows != 0; ++r) {
    float* const to = packed + (r / kStripRows) * kStripRows * head_dim + r % kStripRows;
    for (int d = 0; d < head_dim; ++d) to[d * kStripRows] = 0.0f;
  }
}

// The keys of a block that one row sees, counted from the block's first.
struct Interval {
  int begin;
  int end;
};

// Per strip: the keys that some row sees (outer) and those that all see (inner; empty as [begin, begin)).
struct StripKeys {
  Interval outer;
  Interval inner;
};

// What the passes over one block of keys share.
struct Block {
  int64_t first_key;
  int keys;
  const float* k;  // packed
  const float* v;
};

// The buffers of one subtile.
struct Subtile {
  int first_position;
  int rows;
  const float* q;  // packed
  float* o;        // [kSubtileRows][padded_dim]
  SoftmaxState* state;
};

// Lets the rows of a subtile attend to a block of keys. `s` holds the scores of one pass.
void attend_block(const RaggedTile& tile, const Subtile& subtile, const Block& block, int padded_dim, float* s) {
  const int head_dim = tile.head_dim, keys = block.keys;
  for (int pass = 0; pass < subtile.rows; pass += kPassRows) {
    const int pass_rows = min(kPassRows, subtile.rows - pass);
    const int strips = (pass_rows + kStripRows - 1) / kStripRows;

    Interval seen[kPassRows];
    StripKeys strip_keys[kStripsPerPass];
    int pass_begin = keys, pass_end = 0;
    for (int strip = 0; strip < strips; ++strip) {
      StripKeys& bounds = strip_keys[strip];
      bounds = {{keys, 0}, {0, keys}};
      const int strip_end = min((strip + 1) * kStripRows, pass_rows);
      for (int r = strip * kStripRows; r < strip_end; ++r) {
        const int position = subtile.first_position + (pass + r) / tile.num_heads;
        const int64_t lo = tile.lo[position] - block.first_key, hi = tile.hi[position] - block.first_key;
        seen[r].begin = lo < 0 ? 0 : lo < keys ? static_cast<int>(lo) : keys;
        seen[r].end = hi < seen[r].begin ? seen[r].begin : hi < keys ? static_cast<int>(hi) : keys;
        bounds.inner.begin = max(bounds.inner.begin, seen[r].begin);
        bounds.inner.end = min(bounds.inner.end, seen[r].end);
        if (seen[r].begin < seen[r].end) {
          bounds.outer.begin = min(bounds.outer.begin, seen[r].begin);
          bounds.outer.end = max(bounds.outer.end, seen[r].end);
        }
      }
      if (bounds.inner.begin >= bounds.inner.end) bounds.inner = {0, 0};
      pass_begin = min(pass_begin, bounds.outer.begin);
      pass_end = max(pass_end, bounds.outer.end);
    }
    if (pass_begin >= pass_end) continue;

    // S. A panel of K serves all strips of the pass while it is in the L1 cache.
    for (int first = pass_begin - pass_begin % kPanel; first < pass_end; first += kPanel) {
      for (int strip = 0; strip < strips; ++strip) {
        const Interval outer = strip_keys[strip].outer;
        if (outer.begin >= first + kPanel || outer.end <= first) continue;
        multiply_qk(subtile.q + (pass + strip * kStripRows) * head_dim, block.k + first * head_dim, head_dim,
                    tile.scale_log2, s + strip * kStripRows * kStride + first);
      }
    }

    float factor[kPassRows];
    for (int r = 0; r < kPassRows; ++r) {
      const bool active = r < pass_rows && seen[r].begin < seen[r].end;
      factor[r] = active ? softmax_update(s + r * kStride, seen[r].begin, seen[r].end, subtile.state[pass + r]) : 1.0f;
    }

    // O. A panel of V serves all strips likewise.
    const float one = 1.0f;
    for (int d = 0; d < padded_dim; d += kPanel) {
      const int vecs = min(kPanelVecs, (padded_dim - d) / kWidth);
      const float* const panel = block.v + d * tile.block_keys;
      for (int strip = 0; strip < strips; ++strip) {
        if (strip_keys[strip].outer.begin >= strip_keys[strip].outer.end) continue;
        const Interval inner = strip_keys[strip].inner;
        const int first = strip * kStripRows;
        const int strip_rows = min(kStripRows, pass_rows - first);
        float* const o_strip = subtile.o + (pass + first) * padded_dim + d;
        multiply_pv_for(strip_rows, vecs)(s + first * kStride, panel, inner.begin, inner.end, factor + first, o_strip,
                                          padded_dim);
        const MultiplyPv multiply_row = multiply_pv_for(1, vecs);
        for (int r = 0; r < strip_rows; ++r) {
          const Interval row = seen[first + r];
          const float* const p = s + (first + r) * kStride;
          const int left_end = inner.begin < inner.end ? inner.begin : row.end;
          const int right_begin = inner.begin < inner.end ? inner.end : row.end;
          if (row.begin < left_end) multiply_row(p, panel, row.begin, left_end, &one, o_strip + r * padded_dim, 0);
          if (right_begin < row.end) multiply_row(p, panel, right_begin, row.end, &one, o_strip + r * padded_dim, 0);
        }
      }
    }
  }
}

template <typename Element>
void write_subtile(Element, const RaggedTile& tile, const Subtile& subtile, int padded_dim) {
  typename Element::Type* const out = static_cast<typename Element::Type*>(tile.out);
  int position = subtile.first_position, head = 0;
  for (int r = 0; r < subtile.rows; ++r) {
    const SoftmaxState& state = subtile.state[r];
    typename Element::Type* const to = out + position * tile.out_row_stride + head * tile.out_head_stride;
    if (softmax_empty(state)) {
      __builtin_memset(to, 0, static_cast<size_t>(tile.head_dim) * sizeof(*to));
    } else {
      store_row(Element(), to, tile.head_dim, subtile.o + r * padded_dim, 1.0f / state.sum);
    }
    if (tile.lse != nullptr)
      tile.lse[position * tile.lse_row_stride + head * tile.lse_head_stride] = softmax_lse(state);
    if (++head == tile.num_heads) head = 0, ++position;
  }
}

template <typename Element>
void run_tile(Element, const RaggedTile& tile) {
  using Type = typename Element::Type;
  const int head_dim = tile.head_dim;
  const int padded_dim = (head_dim + kWidth - 1) / kWidth * kWidth;
  const int num_subtiles = (tile.num_rows + tile.subtile_positions - 1) / tile.subtile_positions;

  float* const k = tile.workspace;
  float* const v = k + tile.block_keys * head_dim;
  float* const s = v + tile.block_keys * padded_dim;
  float* next = s + kMaxPassRows * kStride;

  SoftmaxState state[kMaxSubtiles * kSubtileRows];
  Subtile subtiles[kMaxSubtiles];
  for (int i = 0; i < num_subtiles; ++i) {
    const int first = i * tile.subtile_positions;
    const int rows = min(tile.subtile_positions, tile.num_rows - first) * tile.num_heads;
    float* const q = next;
    float* const o = q + kSubtileRows * head_dim;
    next = o + kSubtileRows * padded_dim;
    subtiles[i] = {first, rows, q, o, state + i * kSubtileRows};
    pack_q(Element(), tile, first, rows, q);
    const int padded_rows = (rows + kStripRows - 1) / kStripRows * kStripRows;
    for (int e = 0; e < padded_rows * padded_dim; e += kWidth) store(o + e, Vec{});
    for (int r = 0; r < rows; ++r) subtiles[i].state[r] = {-kInfinity, 0.0f};
  }

  const int64_t key_begin = tile.lo[0] - tile.lo[0] % tile.block_keys;
  const int64_t key_end = tile.hi[tile.num_rows - 1];
  for (int64_t first_key = key_begin; first_key < key_end; first_key += tile.block_keys) {
    const int64_t left = key_end - first_key;
    const int keys = left < tile.block_keys ? static_cast<int>(left) : tile.block_keys;
    pack_k(Element(), static_cast<const Type*>(tile.k) + first_key * tile.k_row_stride, tile.k_row_stride, keys,
           head_dim, k);
    pack_v(Element(), static_cast<const Type*>(tile.v) + first_key * tile.v_row_stride, tile.v_row_stride, keys,
           head_dim, tile.block_keys, v);
    for (int i = 0; i < num_subtiles; ++i) attend_block(tile, subtiles[i], {first_key, keys, k, v}, padded_dim, s);
  }
  for (int i = 0; i < num_subtiles; ++i) write_subtile(Element(), tile, subtiles[i], padded_dim);
}

}  // namespace

void RAGGED_ATTENTION_KERNEL(const RaggedTile& tile) {
  switch (tile.element) {
    case CpuElement::kFloat32:
      return run_tile(Float32(), tile);
    case CpuElement::kFloat16:
      return run_tile(Float16(), tile);
    case CpuElement::kBFloat16:
      return run_tile(BFloat16(), tile);
  }
}

}  // namespace ragged_attention
