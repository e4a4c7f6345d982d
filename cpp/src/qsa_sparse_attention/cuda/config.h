// The row-by-row kernels of qsa_sparse_attention: which are built, and how they share out a row's list. Host code reads
// it too.
//
// Head dims go up to the next bucket (64, 128, 256) and the missing columns are zeros in shared memory.
#pragma once

#include <cstdint>

namespace ragged_attention::portable {

// A warp takes 16 keys at a time: the k16 of the tensor cores' P V, and two n8 tiles of Q K^T.
constexpr int kQsaTileKeys = 16;
// Query heads of one kv head that one CTA holds: the m16 of the tensor cores. Larger groups take several CTAs.
constexpr int kQsaTileHeads = 16;

// Warps a CTA and keys in flight a warp are run-time: no tile shape depends on them, only the rings in shared memory.
constexpr std::int32_t kQsaWarps[] = {1, 2, 4, 8};
constexpr std::int32_t kQsaUnroll[] = {16, 32, 64};

struct QsaLaunchShape {
  std::int32_t warps;
  std::int32_t unroll;
};

// Bits depend on how a list is shared out, so the default may follow the head dim alone, never the batch. Measured on
// an H200 at head dim 256 (8192 rows at 8192 / 8 rows of decode, ms): warps, unroll = (2, 16) 4.71 / 0.134, (4,
// 16) 4.93 / 0.083, (4, 32) 7.07 / 0.081, (8, 16) 5.81 / 0.068. Several CTAs a multiprocessor hide each other's latency
// better than deeper rings do, so the rings of one CTA stay near 64 KB.
constexpr QsaLaunchShape qsa_default_shape(int head_dim_bucket) {
  return head_dim_bucket == 256 ? QsaLaunchShape{4, 16} : QsaLaunchShape{4, 32};
}

// Shared memory of one CTA with 16-bit elements: Q, then a ring of K and V tiles for each warp, whose space the warps'
// partial outputs take at the end.
constexpr int qsa_shared_bytes(int head_dim_bucket, std::int32_t warps, std::int32_t unroll) {
  const int q = kQsaTileHeads * head_dim_bucket * 2;
  const int ring = warps * unroll * head_dim_bucket * 2 * 2;
  const int merge = warps * kQsaTileHeads * (head_dim_bucket + 2) * 4;
  return q + (ring > merge ? ring : merge);
}

// float32: lanes along the head dim, 4 heads a CTA, warps along the list. No ring: keys come straight to registers.
struct QsaFp32 {
  static constexpr int kHeads = 4, kKeys = 4, kWarps = 4;
};

}  // namespace ragged_attention::portable
