// Sequences in a ragged tensor: which rows belong to which, and which tile of work belongs where.
//
// The offsets cut [0, total) into batch + 2 segments: the rows before offsets[0], the sequences, and the rows after
// offsets[batch]. The first and the last segment belong to no sequence; their rows get 0 and -inf like any row with
// nothing to attend to. Treating them as segments means one scheduler covers every row.
//
// Values in the offsets are only known on the device and may be garbage, so every boundary is clamped into [0, total].
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/integer_array.h"

namespace ragged_attention {

// The last of `count` numbers from 0 on that a monotone condition holds for; the first always counts as one.
template <typename Holds>
RAGGED_ATTENTION_HOST_DEVICE std::int64_t last_that(std::int64_t count, const Holds& holds) {
  std::int64_t low = 0, high = count;  // it holds for `low`, and not for `high`
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    if (holds(middle))
      low = middle;
    else
      high = middle;
  }
  return low;
}

struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  RAGGED_ATTENTION_HOST_DEVICE std::int64_t size() const { return end - begin; }
};

struct RaggedRows {
  IntegerArray offsets;  // batch + 1 entries
  std::int64_t batch = 0;
  std::int64_t total = 0;  // rows of the tensor

  RAGGED_ATTENTION_HOST_DEVICE std::int64_t num_segments() const { return batch + 2; }

  RAGGED_ATTENTION_HOST_DEVICE bool owned(std::int64_t segment) const { return segment >= 1 && segment <= batch; }

  // First row of a segment, in [0, total]. Segment batch + 2 is the end.
  RAGGED_ATTENTION_HOST_DEVICE std::int64_t boundary(std::int64_t segment) const {
    if (segment <= 0) return 0;
    if (segment > batch + 1) return total;
    const std::int64_t value = offsets[segment - 1];
    return value < 0 ? 0 : (value > total ? total : value);
  }

  RAGGED_ATTENTION_HOST_DEVICE RowRange rows(std::int64_t segment) const {
    const std::int64_t begin = boundary(segment);
    const std::int64_t end = boundary(segment + 1);
    return {begin, end < begin ? begin : end};
  }

  // The last segment that starts at or before `row`: the one that holds it, if the offsets are monotone.
  RAGGED_ATTENTION_HOST_DEVICE std::int64_t segment_of_row(std::int64_t row) const {
    return last_that(num_segments(), [&](std::int64_t segment) { return boundary(segment) <= row; });
  }

  // Rows of the longest sequence: the hint, or a guess if it is negative. For orders and launch shapes alone.
  std::int64_t likely_longest(std::int64_t hint) const {
    const std::int64_t likely = hint >= 0 ? hint : (batch > 0 ? 2 * total / batch : 0);
    return likely < total ? likely : total;
  }
};

// Tiles of kBlockM rows over the segments, numbered without a prefix sum: tile m of segment s has the id
// boundary(s) / block_m + s + m. Ids never collide (the last tile of a segment stays under the first of the next), some
// belong to no tile, and all are under total / block_m + num_segments.
struct TileSchedule {
  RaggedRows rows;
  std::int32_t block_m = 64;

  RAGGED_ATTENTION_HOST_DEVICE std::int64_t num_ids() const { return rows.total / block_m + rows.num_segments(); }

  RAGGED_ATTENTION_HOST_DEVICE std::int64_t first_id(std::int64_t segment) const {
    return rows.boundary(segment) / block_m + segment;
  }

  struct Tile {
    std::int64_t segment = 0;
    std::int64_t begin = 0;   // first row of the segment
    std::int64_t length = 0;  // rows of the segment
    std::int64_t row = 0;     // first row of the tile, counted from `begin`; not under `length` where the id is empty
  };

  RAGGED_ATTENTION_HOST_DEVICE Tile tile(std::int64_t id) const {
    const std::int64_t segment =
        last_that(rows.num_segments(), [&](std::int64_t candidate) { return first_id(candidate) <= id; });
    const RowRange range = rows.rows(segment);
    const std::int64_t m = id - first_id(segment);
    return {segment, range.begin, range.size(), m < 0 ? range.size() : m * block_m};
  }
};

}  // namespace ragged_attention
