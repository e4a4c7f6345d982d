// Every mask against the predicate of the documentation's table, over all small sizes.
#include <doctest/doctest.h>

#include <cstdint>
#include <initializer_list>
#include <limits>

#include "masks.h"

namespace ragged_attention {
namespace {

template <typename Int>
void check_all(Int max_length) {
  std::int64_t mismatches = 0, not_monotone = 0, out_of_range = 0;
  for (const MaskKind kind : kMaskKinds) {
    for (Int n = 1; n <= max_length; ++n) {
      for (std::int64_t w = has_window(kind) ? 1 : -1; w <= (has_window(kind) ? std::int64_t{n} + 2 : -1); ++w) {
        const Mask mask{kind, w};
        Int previous_lo = 0, previous_hi = 0;
        for (Int i = 0; i < n; ++i) {
          const Int lo = mask.lo(i, n), hi = mask.hi(i, n);
          out_of_range += lo < 0 || hi > n || lo > i || hi <= i;
          not_monotone += lo < previous_lo || hi < previous_hi;
          previous_lo = lo, previous_hi = hi;
          for (Int j = 0; j < n; ++j) mismatches += (lo <= j && j < hi) != sees(mask, i, j);
        }
      }
    }
  }
  CHECK(mismatches == 0);
  CHECK(not_monotone == 0);
  CHECK(out_of_range == 0);
}

TEST_CASE("mask intervals are the table's predicates") {
  check_all<std::int32_t>(21);
  check_all<std::int64_t>(21);
}

TEST_CASE("huge windows and lengths do not overflow") {
  const std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  const std::int32_t n = std::numeric_limits<std::int32_t>::max();
  for (const std::int64_t w : {largest, largest - 1, std::int64_t{n}, std::int64_t{n} + 1}) {
    for (const MaskKind kind : kMaskKinds) {
      if (!has_window(kind)) continue;
      const Mask mask{kind, w};
      CAPTURE(static_cast<int>(kind));
      CHECK(mask.lo(n - 1, n) == 0);
      CHECK(mask.hi(n - 1, n) == n);
      CHECK(mask.hi(std::int32_t{0}, n) == (mask.is_causal() ? 1 : n));
    }
  }
  const Mask chunked{MaskKind::kChunked, std::int64_t{n} - 1};
  CHECK(chunked.hi(n - 1, n) == n);
  CHECK(chunked.lo(n - 1, n) == n - 1);
  CHECK(chunked.hi(n - 2, n) == n - 1);
}

TEST_CASE("is_causal says whether a row sees a later key") {
  for (const MaskKind kind : kMaskKinds) {
    const Mask mask{kind, has_window(kind) ? 3 : -1};
    bool later = false;
    for (int i = 0; i < 9; ++i) later = later || mask.hi(i, 9) > i + 1;
    CHECK(mask.is_causal() == !later);
  }
}

}  // namespace
}  // namespace ragged_attention
