// Where the tokens of a page table lie, looked up in two steps, so that there is other work while the first is on its
// way: what the table has for a token, and what that says.
#pragma once

#include <cstdint>

#include "common/paged.h"

namespace ragged_attention::sm90 {

// For the host: log2 of the page size, -1 where that is no whole number.
inline std::int32_t page_shift(const PagedCache& cache) {
  for (int shift = 0; shift < 31; ++shift) {
    if (cache.page_size == std::int64_t{1} << shift) return shift;
  }
  return -1;
}

// For the host: tokens that a page table has room for, as far as 31 bits go.
inline std::int32_t longest_context(const PagedCache& cache) {
  const std::int64_t most = 0x7fffffff;
  const bool all = cache.max_pages > 0 && cache.page_size > most / cache.max_pages;
  return static_cast<std::int32_t>(all ? most : cache.max_pages * cache.page_size);
}

constexpr std::int32_t kNoToken = -1;

// An entry of the table, perhaps still on its way: two words, of which the upper is not always there.
struct PageEntry {
  std::uint32_t low = 0, high = 0;
};

struct PageLookup {
  const PagedCache& cache;  // of 16-bit elements
  std::int32_t shift;       // page_shift()

  __device__ __forceinline__ std::int32_t slot(std::int32_t token) const {
    if (shift >= 0) return token >> shift;
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(token) / static_cast<std::uint32_t>(cache.page_size));
  }

  // Of a token within the table, or of kNoToken, whose page does not exist.
  __device__ __forceinline__ PageEntry read(std::int64_t sequence, std::int32_t token) const {
    if (token == kNoToken) return {0, 1};
    const IntegerMatrix& table = cache.lookup_table;
    const auto* words = static_cast<const std::uint32_t*>(table.row0.data);
    const std::int64_t at = sequence * table.row_stride + slot(token) * table.row0.stride;
    PageEntry entry;
    if (table.row0.type == IntegerType::kI64) {
      entry.low = words[2 * at];
      entry.high = words[2 * at + 1];
    } else {
      entry.low = words[at];
    }
    return entry;
  }
  __device__ __forceinline__ bool exists(PageEntry entry) const {
    return entry.high == 0 && entry.low < static_cast<std::uint64_t>(cache.num_pages);
  }
  // In bytes, from the first token of head 0 on.
  __device__ __forceinline__ std::int64_t offset(std::int32_t token, PageEntry entry, std::int32_t kv_head) const {
    const std::int32_t within = token - slot(token) * static_cast<std::int32_t>(cache.page_size);
    return 2 * (kv_head * cache.head_stride + entry.low * cache.page_stride + within * cache.token_stride);
  }
};

}  // namespace ragged_attention::sm90
