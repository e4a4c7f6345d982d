// Which rows of a call make a group: neighbours of one sequence, counted from its first row in the call, so that a
// sequence's bits do not depend on the rest of the batch. Host+device arithmetic.
//
// Groups have ids that need no prefix sum. Group m of a segment that begins at row b has the id f(b) + m, where
//     f(b) = b / group_rows + (the segment's number)    for short sequences and the rows of none,
//     f(b) = b / group_rows + b / kQsaShortRows         for long ones, two of which begin more than that apart.
// Ids never collide; some belong to no group.
#pragma once

#include <cstdint>

#include "common/ragged.h"
#include "qsa_sparse_attention/sm90/config.h"

namespace ragged_attention::sm90 {

struct RowGroup {
  std::int64_t segment = 0;
  std::int64_t begin = 0;  // first row, in the call
  std::int32_t rows = 0;   // 0: no group has this id
  bool owned = false;      // by a sequence: segment - 1
};

template <bool kShort>
struct RowGroups {
  RaggedRows rows;
  std::int32_t group_rows = 1;
  QsaApart apart;  // what has a kernel of its own; sequences that are apart by their length have groups all the same

  RAGGED_ATTENTION_HOST_DEVICE std::int64_t mark(std::int64_t begin, std::int64_t segment) const {
    return kShort ? segment : begin / kQsaShortRows;
  }

  RAGGED_ATTENTION_HOST_DEVICE std::int64_t num_ids() const {
    return rows.total / group_rows + (kShort ? rows.num_segments() : rows.total / kQsaShortRows + 1);
  }

  RAGGED_ATTENTION_HOST_DEVICE std::int64_t first_id(std::int64_t segment) const {
    const std::int64_t begin = rows.boundary(segment);
    return begin / group_rows + mark(begin, segment);
  }

  RAGGED_ATTENTION_HOST_DEVICE bool takes(std::int64_t length, bool owned) const {
    if (apart.by_rows(length, owned)) return false;
    const bool is_short = !owned || length <= kQsaShortRows;
    return length > 0 && is_short == kShort;
  }

  // Where `segment` is the last that has first_id(segment) <= id.
  RAGGED_ATTENTION_HOST_DEVICE RowGroup group(std::int64_t id, std::int64_t segment) const {
    RowGroup result;
    const RowRange range = rows.rows(segment);
    const std::int64_t first = (id - first_id(segment)) * group_rows;
    if (!takes(range.size(), rows.owned(segment)) || first < 0 || first >= range.size()) return result;
    result.segment = segment;
    result.begin = range.begin + first;
    result.rows = static_cast<std::int32_t>(range.size() - first < group_rows ? range.size() - first : group_rows);
    result.owned = rows.owned(segment);
    return result;
  }

  // group() by a search of its own.
  RAGGED_ATTENTION_HOST_DEVICE RowGroup group(std::int64_t id) const {
    return group(id, last_that(rows.num_segments(), [&](std::int64_t segment) { return first_id(segment) <= id; }));
  }
};

}  // namespace ragged_attention::sm90
