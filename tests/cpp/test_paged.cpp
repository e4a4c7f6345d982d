// Token addresses in a paged cache.
#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "common/paged.h"

namespace ragged_attention {
namespace {

TEST_CASE("token_offset over all small page sizes, tables and positions") {
  int bad = 0;
  for (std::int64_t page_size = 1; page_size <= 4; ++page_size) {
    for (std::int64_t max_pages = 0; max_pages <= 3; ++max_pages) {
      for (std::int64_t num_pages = 0; num_pages <= 3; ++num_pages) {
        // Two sequences whose entries run over every page id from -2 to num_pages + 1.
        const std::int64_t ids = num_pages + 4;
        for (std::int64_t start = 0; start < ids; ++start) {
          std::vector<std::int32_t> table(static_cast<std::size_t>(2 * max_pages));
          for (std::size_t i = 0; i < table.size(); ++i) {
            table[i] = static_cast<std::int32_t>((start + static_cast<std::int64_t>(i)) % ids - 2);
          }
          PagedCache cache;
          cache.page_stride = 1000;
          cache.token_stride = 10;
          cache.num_pages = num_pages;
          cache.page_size = page_size;
          cache.max_pages = max_pages;
          cache.lookup_table = {{table.data(), 1, IntegerType::kI32}, max_pages};
          for (std::int64_t b = 0; b < 2; ++b) {
            for (std::int64_t length = 0; length <= 14; ++length) {
              for (std::int64_t t = -3; t <= 16; ++t) {
                std::int64_t expected = kNotListed;
                if (t >= 0 && t < length && t / page_size < max_pages) {
                  const std::int64_t page = table[static_cast<std::size_t>(b * max_pages + t / page_size)];
                  if (page >= 0 && page < num_pages) expected = page * 1000 + t % page_size * 10;
                }
                bad += token_offset(cache, b, t, length) != expected;
              }
            }
          }
        }
      }
    }
  }
  CHECK(bad == 0);
}

TEST_CASE("offsets have 64 bits") {
  const std::int64_t table[] = {0, 3000000};
  PagedCache cache;
  cache.page_stride = std::int64_t{1} << 20;
  cache.token_stride = 4096;
  cache.num_pages = 3000001;
  cache.page_size = 64;
  cache.max_pages = 2;
  cache.lookup_table = {{table, 1, IntegerType::kI64}, 2};
  CHECK(token_offset(cache, 0, 64 + 63, 128) == std::int64_t{3000000} * (1 << 20) + 63 * 4096);
  CHECK(token_offset(cache, 0, 128, 1000) == kNotListed);
}

TEST_CASE("one page longer than any position, and the largest position") {
  const std::uint32_t table[] = {0};
  PagedCache cache;
  cache.page_stride = 1;
  cache.token_stride = 256;
  cache.num_pages = 1;
  cache.page_size = std::int64_t{1} << 40;
  cache.max_pages = 1;
  cache.lookup_table = {{table, 1, IntegerType::kU32}, 1};
  const std::int64_t largest = std::numeric_limits<std::int32_t>::max();
  CHECK(token_offset(cache, 0, largest, largest + 1) == largest * 256);
  CHECK(token_offset(cache, 0, largest, largest) == kNotListed);
  CHECK(token_offset(cache, 0, std::numeric_limits<std::int32_t>::min(), largest) == kNotListed);
}

TEST_CASE("strided lookup tables") {
  const std::int32_t table[] = {0, 9, 1, 9, 9, 9, 2, 9, 0, 9, 9, 9};  // rows 6 apart, columns 2 apart
  PagedCache cache;
  cache.page_stride = 100;
  cache.token_stride = 1;
  cache.num_pages = 3;
  cache.page_size = 4;
  cache.max_pages = 2;
  cache.lookup_table = {{table, 2, IntegerType::kI32}, 6};
  CHECK(token_offset(cache, 0, 5, 8) == 101);
  CHECK(token_offset(cache, 1, 3, 8) == 203);
  CHECK(token_offset(cache, 1, 4, 8) == 0);
}

TEST_CASE("visible_length") {
  CHECK(visible_length(5, 3) == 8);
  CHECK(visible_length(-7, 3) == 3);
  CHECK(visible_length(std::numeric_limits<std::int64_t>::max(), 3) > std::numeric_limits<std::int32_t>::max());
  CHECK(visible_length(std::numeric_limits<std::int64_t>::min(), 0) == 0);
}

}  // namespace
}  // namespace ragged_attention
