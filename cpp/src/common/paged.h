// Where a token of a sequence lies in a paged KV cache.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/integer_array.h"

namespace ragged_attention {

// K and V of one layer. Strides are in elements; K and V need not share a base, so caches of other layouts fit too.
struct PagedCache {
  const void* k = nullptr;
  const void* v = nullptr;
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t num_pages = 0;
  std::int64_t page_size = 1;
  std::int64_t max_pages = 0;  // columns of the lookup table
  IntegerMatrix lookup_table;  // [batch, max_pages]
};

// What token_offset says of a token that counts as not listed. (Strides may be negative, so -1 could be an offset.)
constexpr std::int64_t kNotListed = INT64_MIN;

// Element offset of token t of sequence b from the cache's k (or v), head 0; kNotListed where the token is
// outside [0, length), past the page table, or on a page that does not exist.
RAGGED_ATTENTION_HOST_DEVICE std::int64_t token_offset(const PagedCache& cache, std::int64_t b, std::int64_t t,
                                                       std::int64_t length) {
  if (t < 0 || t >= length) return kNotListed;
  // t comes from an int32 list, so a 32-bit division serves; a page longer than that holds every token.
  const std::uint32_t token = static_cast<std::uint32_t>(t);
  const std::uint32_t slot = cache.page_size > 0x7fffffff ? 0u : token / static_cast<std::uint32_t>(cache.page_size);
  if (slot >= cache.max_pages) return kNotListed;
  const std::int64_t page = cache.lookup_table.at(b, slot);
  if (page < 0 || page >= cache.num_pages) return kNotListed;
  const std::int64_t offset = static_cast<std::int64_t>(token) - slot * cache.page_size;
  return page * cache.page_stride + offset * cache.token_stride;
}

// Keys that a sequence's rows may name: the cached ones and this step's. A negative length counts as 0, and so large a
// one that the sum would overflow is cut (a token index has 31 bits).
RAGGED_ATTENTION_HOST_DEVICE std::int64_t visible_length(std::int64_t cache_length, std::int64_t rows) {
  const std::int64_t limit = std::int64_t{1} << 40;
  const std::int64_t cached = cache_length < 0 ? 0 : (cache_length > limit ? limit : cache_length);
  return cached + rows;
}

}  // namespace ragged_attention
