// The portable kernels of ragged_flash_attention: which are built, and their tiles. Host code reads it too.
//
// Head dims go up to the next bucket and the missing columns are filled with zeros in shared memory: few
// instantiations, and what is lost in the odd sizes the Hopper kernels take back. Every tile fits the 99 KB of shared
// memory that the smallest supported GPUs (sm_86, sm_89, sm_120) give a block.
#pragma once

namespace ragged_attention::portable {

// bfloat16 and float16: shared memory is (block_m + 2 * block_n) * head_dim * 2 bytes, a warp holds 16 or 32 rows.
template <int kHeadDim>
struct RaggedTile;

template <>
struct RaggedTile<64> {  // 32 KB; 128 keys would spill S, and were 10 % slower at 16384 tokens on an H200
  static constexpr int kBlockM = 128, kBlockN = 64, kWarps = 4;
};
template <>
struct RaggedTile<96> {  // 48 KB; takes 72 and 80 too
  static constexpr int kBlockM = 128, kBlockN = 64, kWarps = 4;
};
template <>
struct RaggedTile<128> {  // 64 KB; O is 128 registers a thread, S 64: 255 registers, two blocks a multiprocessor
  static constexpr int kBlockM = 128, kBlockN = 64, kWarps = 4;
};
template <>
struct RaggedTile<192> {  // 72 KB; 64 rows, since 128 would need 192 registers a thread for O alone
  static constexpr int kBlockM = 64, kBlockN = 64, kWarps = 4;
};
template <>
struct RaggedTile<256> {  // 96 KB; likewise
  static constexpr int kBlockM = 64, kBlockN = 64, kWarps = 4;
};

// float32, on FMA units (no TF32): 64 x 64 scores in 4 x 4 a thread, operands staged through 32 or 64 columns at a
// time.
struct RaggedTileFp32 {
  static constexpr int kBlockM = 64, kBlockN = 64, kThreads = 256;
  static constexpr int kKStep = 32;  // columns of Q and K staged at a time
  static constexpr int kVStep = 64;  // columns of V
};

}  // namespace ragged_attention::portable
