// Which tiles a Hopper kernel computes, in which order, and which keys each meets: host+device arithmetic, no memory
// but the offsets.
#pragma once

#include <cstdint>

#include "common/mask.h"
#include "common/ragged.h"
#include "ragged_flash_attention/sm90/config.h"

namespace ragged_attention::sm90 {

// A tile of query rows of one head.
struct Tile {
  std::int32_t begin = 0;   // first row of the sequence
  std::int32_t length = 0;  // rows of the sequence; 0: no tile; -1: no more tiles
  std::int32_t row = 0;     // first row of the tile, counted from `begin`
  std::int32_t head = 0;
  bool owned = false;     // false: rows that no sequence owns, to be filled with 0 and -inf
  bool keeps_kv = false;  // the next tile meets the same keys and values, and they stay where they are
};

// Work is handed out in units: a tile's rows and `unit_heads` query heads.
struct Unit {
  std::int32_t id = 0;
  std::int32_t head = 0;  // the first
};

// Sequences of so few rows need no tiles: the short kernel gives each a warp for every kv head (tiny.cuh).
constexpr std::int64_t kTinyRows = 16;
RAGGED_ATTENTION_HOST_DEVICE bool is_tiny(std::int64_t length, bool owned) {
  return owned && length > 0 && length <= kTinyRows;
}

// The segments (sequences, and the unowned rows at both ends) of more than `longer` and at most `longest` rows that are
// not tiny, cut into tiles of kBlockM rows. kLonger is no more than `longer`, and known.
//
// Tiles have ids that need no prefix sum. Tile m of a segment that begins at row b has the id f(b) + m, where
//     f(b) = b / kBlockM + b / kLonger      if kLonger > 0: two such segments begin more than kLonger rows apart,
//     f(b) = b / kBlockM + (its number)     otherwise.
// Either way the second term grows by at least 1 from a segment to the next, and the first by at least the quotient of
// its rows, so ids never collide. Some ids belong to no tile.
//
// Rows, ids and units must stay under 2^30 (the host sees to it).
template <int kBlockM, int kLonger>
struct Schedule {
  RaggedRows rows;
  std::int32_t longest = kAnyLength;
  std::int32_t num_heads = 1;
  // Heads are taken in bands, all tiles of a band before the next band's, so that the keys and values of the tiles in
  // flight fit in L2. Divides num_heads.
  std::int32_t band = 1;
  std::int32_t unit_heads = 1;  // divides band
  std::int32_t longer = kLonger;

  RAGGED_ATTENTION_HOST_DEVICE std::int64_t num_ids() const {
    const std::int64_t marks = kLonger > 0 ? rows.total / (kLonger > 0 ? kLonger : 1) + 1 : rows.num_segments();
    return rows.total / kBlockM + marks;
  }

  RAGGED_ATTENTION_HOST_DEVICE std::int64_t num_units() const { return num_ids() * (num_heads / unit_heads); }

  RAGGED_ATTENTION_HOST_DEVICE std::int32_t first_id(std::int32_t segment) const {
    const auto begin = static_cast<std::uint32_t>(rows.boundary(segment));
    const std::uint32_t mark = kLonger > 0 ? begin / (kLonger > 0 ? kLonger : 1) : static_cast<std::uint32_t>(segment);
    return static_cast<std::int32_t>(begin / kBlockM + mark);
  }

  RAGGED_ATTENTION_HOST_DEVICE bool takes(std::int64_t length, bool owned) const {
    return length > longer && length <= longest && !is_tiny(length, owned);
  }

  // Units run over the heads of a band first, then over ids from the last to the first (under a causal mask a
  // sequence's late tiles are the long ones), then over bands.
  RAGGED_ATTENTION_HOST_DEVICE Unit unit(std::int32_t number) const {
    const auto n = static_cast<std::uint32_t>(number), ids = static_cast<std::uint32_t>(num_ids());
    const std::uint32_t in_id = static_cast<std::uint32_t>(band) / static_cast<std::uint32_t>(unit_heads);
    const std::uint32_t band_index = n / (ids * in_id), rest = n - band_index * (ids * in_id);
    return {static_cast<std::int32_t>(ids - 1 - rest / in_id),
            static_cast<std::int32_t>(band_index * static_cast<std::uint32_t>(band) +
                                      rest % in_id * static_cast<std::uint32_t>(unit_heads))};
  }

  // Where `segment` is the last that has first_id(segment) <= id: the tile, of head 0. `length` 0 where there is none.
  RAGGED_ATTENTION_HOST_DEVICE Tile tile(std::int32_t id, std::int32_t segment) const {
    Tile result;
    const RowRange range = rows.rows(segment);
    const auto begin = static_cast<std::int32_t>(range.begin), length = static_cast<std::int32_t>(range.size());
    const std::int32_t m = id - first_id(segment);
    if (!takes(length, rows.owned(segment)) || m < 0 || m > (length - 1) / kBlockM) return result;
    result.begin = begin;
    result.length = length;
    result.row = m * kBlockM;
    result.owned = rows.owned(segment);
    return result;
  }
};

// A band of heads whose keys and values, as far as tiles in flight together need them, take half of a 60 MB L2.
RAGGED_ATTENTION_HOST_DEVICE std::int32_t heads_in_band(const RaggedRows& rows, const Mask& mask,
                                                        std::int32_t num_kv_heads, std::int32_t group,
                                                        std::int32_t head_dim) {
  constexpr std::int64_t kBytes = 30 << 20;
  // Lengths are on the device; a guess is enough for an order.
  std::int64_t live = rows.batch > 1 ? 2 * (rows.total / rows.batch) : rows.total;
  if (mask.window > 0 && mask.is_causal() && mask.window < live / 2) live = 2 * mask.window;
  const std::int64_t per_head = (live > 0 ? live : 1) * head_dim * 4;
  std::int64_t kv_heads = kBytes / per_head;
  kv_heads = kv_heads < 1 ? 1 : (kv_heads > num_kv_heads ? num_kv_heads : kv_heads);
  while (num_kv_heads % kv_heads != 0) --kv_heads;
  return static_cast<std::int32_t>(kv_heads) * group;
}

// Without tickets (tickets.h), the unit a CTA takes in its `round`: there and back again, so that no CTA gets the
// longer tile of every round; and every other round from elsewhere, so that none meets empty ids more often than others
// where those come at regular intervals.
RAGGED_ATTENTION_HOST_DEVICE std::int32_t static_unit(std::int32_t round, std::int32_t cta, std::int32_t num_ctas) {
  const auto ctas = static_cast<std::uint32_t>(num_ctas), turn = static_cast<std::uint32_t>(round) / 2;
  const std::uint32_t from = turn * (ctas * 5 / 8 + 1) + static_cast<std::uint32_t>(cta);
  const auto place = static_cast<std::int32_t>(from % ctas);
  return round * num_ctas + (round % 2 == 0 ? place : num_ctas - 1 - place);
}

// The tiles of keys that query rows [row, row + rows) of a sequence meet, from the first key that the first row sees
// on.
struct KeyTiles {
  std::int32_t begin = 0;  // first key of tile 0
  std::int32_t count = 0;
};

template <int kBlockN>
RAGGED_ATTENTION_HOST_DEVICE KeyTiles key_tiles(const Mask& mask, std::int32_t length, std::int32_t row,
                                                std::int32_t rows) {
  const std::int32_t last = (rows < length - row ? row + rows : length) - 1;
  const std::int32_t begin = mask.lo(row, length);
  const std::int32_t end = mask.hi(last, length);
  return {begin, (end - begin + kBlockN - 1) / kBlockN};
}

// What part of them a warpgroup of 64 of those rows needs, and between which keys all its rows see everything.
struct KeySpan {
  std::int32_t first_tile = 0, last_tile = 0;  // half open; equal where the warpgroup has no rows
  std::int32_t full_begin = 0, full_end = 0;   // keys
};

template <int kBlockN>
RAGGED_ATTENTION_HOST_DEVICE KeySpan key_span(const Mask& mask, std::int32_t length, std::int32_t row,
                                              std::int32_t rows, std::int32_t key_begin) {
  KeySpan span;
  if (row >= length) return span;
  const std::int32_t last = (rows < length - row ? row + rows : length) - 1;
  span.first_tile = (mask.lo(row, length) - key_begin) / kBlockN;
  span.last_tile = (mask.hi(last, length) - key_begin + kBlockN - 1) / kBlockN;
  span.full_begin = mask.lo(last, length);
  span.full_end = mask.hi(row, length);
  return span;
}

}  // namespace ragged_attention::sm90
