// Offsets of ragged rows for the tests.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "common/ragged.h"

namespace ragged_attention {

using Offsets = std::vector<std::int64_t>;

inline RaggedRows rows_of(const Offsets& offsets, std::int64_t total) {
  return {{offsets.data(), 1, IntegerType::kI64}, static_cast<std::int64_t>(offsets.size()) - 1, total};
}

// Calls visit(offsets) for every non-decreasing vector of batch + 1 of the values, which are sorted.
inline void for_all_offsets(const Offsets& values, int batch, const std::function<void(const Offsets&)>& visit) {
  Offsets offsets(static_cast<std::size_t>(batch) + 1, 0);
  std::function<void(std::size_t, std::size_t)> fill = [&](std::size_t at, std::size_t least) {
    if (at == offsets.size()) return visit(offsets);
    for (std::size_t i = least; i < values.size(); ++i) {
      offsets[at] = values[i];
      fill(at + 1, i);
    }
  };
  fill(0, 0);
}

}  // namespace ragged_attention
