// How rows lie in shared memory for the matrix products: host+device arithmetic.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace ragged_attention::sm90 {

constexpr int kBlockColumns = 64;  // 16-bit elements of one swizzled 128-byte row
constexpr int kBlockRowBytes = 128;

// Byte offset of a row's 16-byte chunk in a tile of kRows rows: blocks of 64 columns one after the other, in each the
// rows, in each row 8 chunks, swapped by the row (the 128-byte swizzle of TMA and wgmma).
template <int kRows>
RAGGED_ATTENTION_HOST_DEVICE std::uint32_t chunk_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(chunk / 8 * (kRows * kBlockRowBytes) + row * kBlockRowBytes +
                                    ((chunk ^ row) % 8) * 16);
}

// The same chunk `rows` rows further down, from an address that has chunk_offset() of a row r in it and a multiple of
// 128 besides, where r % 8 and rows % 8 have no bit in common.
RAGGED_ATTENTION_HOST_DEVICE std::uint32_t rows_down(std::uint32_t address, int rows) {
  return (address ^ static_cast<std::uint32_t>(rows % 8 * 16)) + static_cast<std::uint32_t>(rows * kBlockRowBytes);
}

}  // namespace ragged_attention::sm90
