// Segments and tiles of ragged tensors, over all offset vectors of small totals, and with garbage in the offsets.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "common/ragged.h"

namespace ragged_attention {
namespace {

RaggedRows rows_of(const std::vector<std::int64_t>& offsets, std::int64_t total) {
  return {{offsets.data(), 1, IntegerType::kI64}, static_cast<std::int64_t>(offsets.size()) - 1, total};
}

// Calls visit(offsets) for every non-decreasing vector of batch + 1 offsets in [0, total].
void for_all_offsets(std::int64_t total, int batch,
                     const std::function<void(const std::vector<std::int64_t>&)>& visit) {
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(batch) + 1, 0);
  std::function<void(std::size_t, std::int64_t)> fill = [&](std::size_t at, std::int64_t least) {
    if (at == offsets.size()) return visit(offsets);
    for (std::int64_t value = least; value <= total; ++value) {
      offsets[at] = value;
      fill(at + 1, value);
    }
  };
  fill(0, 0);
}

// Everything the schedule promises for monotone offsets; returns the number of broken promises.
int broken(const std::vector<std::int64_t>& offsets, std::int64_t total, int block_m) {
  int bad = 0;
  const RaggedRows rows = rows_of(offsets, total);
  const std::int64_t batch = rows.batch;
  std::vector<int> segments(static_cast<std::size_t>(total), -1), covered(static_cast<std::size_t>(total), 0);
  std::int64_t at = 0;
  for (std::int64_t s = 0; s < rows.num_segments(); ++s) {
    const RowRange range = rows.rows(s);
    bad += range.begin != at;
    bad += rows.owned(s) && (range.begin != offsets[static_cast<std::size_t>(s - 1)] ||
                             range.end != offsets[static_cast<std::size_t>(s)]);
    for (std::int64_t r = range.begin; r < range.end; ++r) segments[static_cast<std::size_t>(r)] = static_cast<int>(s);
    at = range.end;
  }
  bad += at != total;
  bad += rows.owned(0) || rows.owned(batch + 1);
  for (std::int64_t r = 0; r < total; ++r) bad += rows.segment_of_row(r) != segments[static_cast<std::size_t>(r)];

  const TileSchedule schedule{rows, block_m};
  std::set<std::int64_t> expected_ids;
  for (std::int64_t s = 0; s < rows.num_segments(); ++s) {
    const std::int64_t tiles = (rows.rows(s).size() + block_m - 1) / block_m;
    for (std::int64_t m = 0; m < tiles; ++m) {
      const std::int64_t id = schedule.first_id(s) + m;
      bad += !expected_ids.insert(id).second || id < 0 || id >= schedule.num_ids();
    }
  }
  std::set<std::int64_t> found_ids;
  for (std::int64_t id = 0; id < schedule.num_ids(); ++id) {
    const TileSchedule::Tile tile = schedule.tile(id);
    if (tile.row >= tile.length) continue;
    found_ids.insert(id);
    bad += tile.row % block_m != 0 || tile.row < 0;
    bad += tile.begin != rows.rows(tile.segment).begin || tile.length != rows.rows(tile.segment).size();
    for (std::int64_t r = tile.row; r < tile.row + block_m && r < tile.length; ++r) {
      ++covered[static_cast<std::size_t>(tile.begin + r)];
      bad += segments[static_cast<std::size_t>(tile.begin + r)] != tile.segment;
    }
  }
  bad += found_ids != expected_ids;
  for (const int times : covered) bad += times != 1;
  return bad;
}

TEST_CASE("each row is in one segment and one tile, for all offsets of small totals") {
  std::int64_t vectors = 0;
  for (std::int64_t total = 0; total <= 8; ++total) {
    for (int batch = 0; batch <= 3; ++batch) {
      for (int block_m = 1; block_m <= 5; ++block_m) {
        int bad = 0;
        for_all_offsets(total, batch, [&](const std::vector<std::int64_t>& offsets) {
          bad += broken(offsets, total, block_m);
          ++vectors;
        });
        CAPTURE(total);
        CAPTURE(batch);
        CAPTURE(block_m);
        CHECK(bad == 0);
      }
    }
  }
  CHECK(vectors > 5000);
}

TEST_CASE("each row is in one tile, for random offsets of larger totals") {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const std::int64_t total = static_cast<std::int64_t>(random() % 400);
    std::vector<std::int64_t> offsets(1 + random() % 12);
    for (std::int64_t& value : offsets) value = static_cast<std::int64_t>(random() % (total + 1));
    std::sort(offsets.begin(), offsets.end());
    CHECK(broken(offsets, total, 1 + static_cast<int>(random() % 150)) == 0);
  }
}

TEST_CASE("garbage offsets never leave the rows") {
  const std::int64_t values[] = {
      0, 3, 5, -1, 6, 1000, std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()};
  const std::int64_t total = 5;
  int bad = 0;
  for (const std::int64_t a : values) {
    for (const std::int64_t b : values) {
      for (const std::int64_t c : values) {
        const std::vector<std::int64_t> offsets{a, b, c};
        const RaggedRows rows = rows_of(offsets, total);
        for (std::int64_t s = -1; s <= rows.num_segments(); ++s) {
          const RowRange range = rows.rows(s);
          bad += range.begin < 0 || range.end < range.begin || range.end > total;
        }
        for (std::int64_t r = 0; r < total; ++r) {
          const std::int64_t segment = rows.segment_of_row(r);
          bad += segment < 0 || segment >= rows.num_segments();
        }
        for (int block_m = 1; block_m <= 6; ++block_m) {
          const TileSchedule schedule{rows, block_m};
          bad += schedule.num_ids() < 0;
          for (std::int64_t id = 0; id < schedule.num_ids(); ++id) {
            const TileSchedule::Tile tile = schedule.tile(id);
            if (tile.row >= tile.length) continue;
            bad += tile.row < 0 || tile.begin < 0 || tile.begin + tile.length > total;
          }
        }
      }
    }
  }
  CHECK(bad == 0);
}

TEST_CASE("the longest sequence is what the hint says, or twice the average, and never longer than the tensor") {
  const auto likely = [](std::int64_t total, std::int64_t batch, std::int64_t hint) {
    RaggedRows rows;
    rows.total = total;
    rows.batch = batch;
    return rows.likely_longest(hint);
  };
  CHECK(likely(100, 4, -1) == 50);
  CHECK(likely(100, 1, -1) == 100);
  CHECK(likely(100, 0, -1) == 0);
  CHECK(likely(100, 4, 0) == 0);
  CHECK(likely(100, 4, 70) == 70);
  CHECK(likely(100, 4, 101) == 100);
}

TEST_CASE("offsets of every integer type and stride read alike") {
  const std::int32_t int32s[] = {0, 99, 4, 99, -2, 99};
  const std::uint32_t uint32s[] = {0u, 4u, 0xfffffffeu};
  const std::int64_t int64s[] = {std::int64_t{1} << 40, 4, 0};
  const IntegerArray a{int32s, 2, IntegerType::kI32};
  CHECK((a[0] == 0 && a[1] == 4 && a[2] == -2));
  const IntegerArray b{uint32s, 1, IntegerType::kU32};
  CHECK((b[0] == 0 && b[1] == 4 && b[2] == 0xfffffffe));
  const IntegerArray c{int64s + 2, -1, IntegerType::kI64};
  CHECK((c[0] == 0 && c[1] == 4 && c[2] == std::int64_t{1} << 40));
  const IntegerMatrix m{{int32s, 2, IntegerType::kI32}, 1};
  CHECK((m.at(0, 1) == 4 && m.at(1, 1) == 99 && m.at(0, 2) == -2));
  // uint32 values past 2^31 are large, not negative: they clamp to the end.
  const RaggedRows rows{b, 2, 7};
  CHECK((rows.rows(2).begin == 4 && rows.rows(2).end == 7));
}

}  // namespace
}  // namespace ragged_attention
