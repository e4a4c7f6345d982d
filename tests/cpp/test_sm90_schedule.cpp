// The arithmetic of the Hopper kernels: tiles, units, searches, key ranges and TMA coordinates, exhaustively over small
// sizes and with garbage in the offsets.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "common/cuda/sm90/ragged_coordinates.h"
#include "common/cuda/sm90/warp_search.h"
#include "masks.h"
#include "offsets.h"
#include "ragged_flash_attention/sm90/schedule.h"

namespace ragged_attention::sm90 {
namespace {

Offsets all_up_to(std::int64_t total) {
  Offsets values;
  for (std::int64_t value = 0; value <= total; ++value) values.push_back(value);
  return values;
}

// What a warp finds in `count` entries, and after how many probes.
template <typename Holds>
std::pair<std::int32_t, int> warp_search(std::int32_t count, const Holds& holds) {
  WarpSearch search{0, count};
  int probes = 0;
  for (; !search.done() && probes < 100; ++probes) {
    int lanes = 0;
    for (std::int32_t lane = 0; lane < 32; ++lane) {
      const std::int32_t probe = search.probe(lane);
      lanes += lane == 0 || (probe < search.high && holds(probe));
    }
    search.narrow(lanes);
  }
  return {search.low, probes};
}

template <typename Schedule>
std::int32_t find_segment(const Schedule& schedule, std::int32_t id) {
  return warp_search(static_cast<std::int32_t>(schedule.rows.num_segments()),
                     [&](std::int32_t segment) { return schedule.first_id(segment) <= id; })
      .first;
}

// How often the rows are met, and in how many ways the tests' promises are broken.
struct Coverage {
  std::vector<int> rows;
  int bad = 0;
  int tiles = 0;

  explicit Coverage(std::int64_t total) : rows(static_cast<std::size_t>(total), 0) {}

  void add(std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) ++rows[static_cast<std::size_t>(r)];
  }
};

// Everything that a schedule promises for monotone offsets. Adds the rows of its tiles.
template <int kBlockM, int kLonger>
void check_schedule(const RaggedRows& rows, std::int32_t longer, std::int32_t longest, Coverage& coverage) {
  const Schedule<kBlockM, kLonger> schedule{rows, longest, 1, 1, 1, longer};
  int& bad = coverage.bad;
  const auto segments = static_cast<std::int32_t>(rows.num_segments());
  std::set<std::int64_t> expected;
  std::vector<int> wanted(coverage.rows.size(), 0), met(coverage.rows.size(), 0);
  for (std::int32_t s = 0; s < segments; ++s) {
    const RowRange range = rows.rows(s);
    if (!schedule.takes(range.size(), rows.owned(s))) continue;
    bad += range.size() == 0 || range.size() <= longer || range.size() > longest;
    for (std::int64_t r = range.begin; r < range.end; ++r) ++wanted[static_cast<std::size_t>(r)];
    for (std::int64_t m = 0; m * kBlockM < range.size(); ++m) {
      const std::int64_t id = schedule.first_id(s) + m;
      bad += !expected.insert(id).second || id < 0 || id >= schedule.num_ids();
    }
  }
  std::set<std::int64_t> found;
  for (std::int32_t id = 0; id < schedule.num_ids(); ++id) {
    std::int32_t segment = 0;
    while (segment + 1 < segments && schedule.first_id(segment + 1) <= id) ++segment;
    bad += find_segment(schedule, id) != segment;
    const Tile tile = schedule.tile(id, segment);
    bad += tile.length < 0 || tile.head != 0 || tile.keeps_kv;
    if (tile.length == 0) continue;
    ++coverage.tiles;
    found.insert(id);
    bad += tile.row < 0 || tile.row >= tile.length || tile.row % kBlockM != 0;
    bad += tile.begin != rows.rows(segment).begin || tile.length != rows.rows(segment).size();
    bad += tile.owned != rows.owned(segment);
    const std::int64_t begin = tile.begin + tile.row, end = tile.begin + std::min(tile.row + kBlockM, tile.length);
    coverage.add(begin, end);
    for (std::int64_t r = begin; r < end; ++r) ++met[static_cast<std::size_t>(r)];
  }
  bad += found != expected;
  bad += met != wanted;
}

void add_tiny(const RaggedRows& rows, Coverage& coverage) {
  for (std::int64_t s = 0; s < rows.num_segments(); ++s) {
    const RowRange range = rows.rows(s);
    if (is_tiny(range.size(), rows.owned(s))) coverage.add(range.begin, range.end);
  }
}

// A call of both kernels with their border at `longer`, and of the short one alone: every row once.
template <int kBlockLong, int kBlockShort, int kLonger>
int broken(const Offsets& offsets, std::int64_t total, int* tiles, std::int32_t longer = kLonger) {
  const RaggedRows rows = rows_of(offsets, total);
  int bad = 0;
  for (const bool both : {true, false}) {
    Coverage coverage(total);
    if (both) {
      check_schedule<kBlockLong, kLonger>(rows, longer, kAnyLength, coverage);
      bad += total <= longer && coverage.tiles > 0;  // where the host leaves the long kernel out
      tiles[0] += coverage.tiles;
      coverage.tiles = 0;
    }
    check_schedule<kBlockShort, 0>(rows, 0, both ? longer : kAnyLength, coverage);
    tiles[1] += coverage.tiles;
    add_tiny(rows, coverage);
    bad += coverage.bad;
    for (const int times : coverage.rows) bad += times != 1;
  }
  return bad;
}

int broken(const Offsets& offsets, std::int64_t total, int* tiles) {
  return broken<2, 2, 4>(offsets, total, tiles) + broken<3, 2, 5>(offsets, total, tiles) +
         broken<3, 2, 4>(offsets, total, tiles, 7) + broken<2, 1, 3>(offsets, total, tiles, 18) +
         broken<6, 3, 5>(offsets, total, tiles) + broken<4, 1, 17>(offsets, total, tiles) +
         broken<3, 5, 20>(offsets, total, tiles);
}

TEST_CASE("each row is in one tile of one kernel or in a tiny sequence, for all offsets of small totals") {
  int tiles[2] = {};
  std::int64_t vectors = 0;
  for (std::int64_t total = 0; total <= 8; ++total) {
    for (int batch = 0; batch <= 3; ++batch) {
      int bad = 0;
      for_all_offsets(all_up_to(total), batch, [&](const Offsets& offsets) {
        bad += broken(offsets, total, tiles);
        ++vectors;
      });
      CAPTURE(total);
      CAPTURE(batch);
      CHECK(bad == 0);
    }
  }
  CHECK(vectors > 1000);
  CHECK(tiles[0] > 0);
  CHECK(tiles[1] > 0);
}

TEST_CASE("and for lengths around the borders of tiny, short and long") {
  const Offsets values{0, 1, 4, 5, 6, 16, 17, 18, 21, 22, 33, 34, 38, 39, 40, 55};
  int tiles[2] = {};
  for (const std::int64_t total : {17, 18, 22, 34, 39, 55}) {
    Offsets inside;
    for (const std::int64_t value : values) {
      if (value <= total) inside.push_back(value);
    }
    for (int batch = 0; batch <= 3; ++batch) {
      int bad = 0;
      for_all_offsets(inside, batch, [&](const Offsets& offsets) { bad += broken(offsets, total, tiles); });
      CAPTURE(total);
      CAPTURE(batch);
      CHECK(bad == 0);
    }
  }
  // One or two sequences of every length.
  for (std::int64_t total = 9; total <= 24; ++total) {
    for (int batch = 1; batch <= 2; ++batch) {
      int bad = 0;
      for_all_offsets(all_up_to(total), batch, [&](const Offsets& offsets) { bad += broken(offsets, total, tiles); });
      CAPTURE(total);
      CHECK(bad == 0);
    }
  }
  CHECK(tiles[0] > 1000);
  CHECK(tiles[1] > 1000);
}

TEST_CASE("and for random offsets, with the kernels' own tiles") {
  std::mt19937 random(1);
  int tiles[2] = {};
  for (int round = 0; round < 300; ++round) {
    const auto total = static_cast<std::int64_t>(random() % 4000);
    Offsets offsets(1 + random() % (round % 2 == 0 ? 8 : 100));
    for (std::int64_t& value : offsets) value = static_cast<std::int64_t>(random() % (total + 1));
    std::sort(offsets.begin(), offsets.end());
    CHECK(broken<192, 64, 256>(offsets, total, tiles) == 0);        // up to D 96
    CHECK(broken<192, 64, 256>(offsets, total, tiles, 1024) == 0);  // D 64, causal
    CHECK(broken<128, 64, 256>(offsets, total, tiles) == 0);        // D 128
    CHECK(broken<128, 128, 1024>(offsets, total, tiles) == 0);      // D 192 and 256
  }
  CHECK(tiles[0] > 1000);
  CHECK(tiles[1] > 1000);
}

TEST_CASE("which segments are tiny, short, long") {
  const Schedule<2, 0> only_short{{}, kAnyLength};
  const Schedule<2, 0> short_kernel{{}, 20};
  const Schedule<2, 20> long_kernel{{}, kAnyLength};
  const Schedule<2, 20> longer_kernel{{}, kAnyLength, 1, 1, 1, 31};
  for (std::int64_t length = 0; length <= 50; ++length) {
    CAPTURE(length);
    for (const bool owned : {false, true}) {
      const bool tiny = is_tiny(length, owned);
      CHECK(tiny == (owned && length >= 1 && length <= 16));
      CHECK(only_short.takes(length, owned) == (length > 0 && !tiny));
      CHECK(short_kernel.takes(length, owned) == (length > 0 && length <= 20 && !tiny));
      CHECK(long_kernel.takes(length, owned) == (length > 20));
      CHECK(longer_kernel.takes(length, owned) == (length > 31));
    }
  }
}

TEST_CASE("units meet every id and every head once, a band at a time, and a band's ids from the last to the first") {
  for (const std::int64_t total : {0, 1, 5, 16, 17, 40}) {
    for (std::int64_t batch = 0; batch <= 3; ++batch) {
      const Offsets offsets(static_cast<std::size_t>(batch) + 1, total / 2);
      const RaggedRows rows = rows_of(offsets, total);
      for (std::int32_t heads = 1; heads <= 24; ++heads) {
        for (std::int32_t band = 1; band <= heads; ++band) {
          if (heads % band != 0) continue;
          for (std::int32_t unit_heads = 1; unit_heads <= band; ++unit_heads) {
            if (band % unit_heads != 0) continue;
            const Schedule<3, 0> schedule{rows, kAnyLength, heads, band, unit_heads};
            const auto units = static_cast<std::int32_t>(schedule.num_units());
            int bad = units != schedule.num_ids() * (heads / unit_heads);
            std::set<std::pair<std::int32_t, std::int32_t>> seen;
            std::pair<std::int32_t, std::int32_t> last{-1, 0};  // band, how far from the last id
            for (std::int32_t number = 0; number < units; ++number) {
              const Unit unit = schedule.unit(number);
              bad += unit.id < 0 || unit.id >= schedule.num_ids();
              bad += unit.head < 0 || unit.head % unit_heads != 0 || unit.head + unit_heads > heads;
              bad += !seen.insert({unit.id, unit.head}).second;
              const std::pair<std::int32_t, std::int32_t> at{unit.head / band,
                                                             static_cast<std::int32_t>(schedule.num_ids()) - unit.id};
              bad += at < last;
              last = at;
            }
            CAPTURE(total);
            CAPTURE(heads);
            CAPTURE(band);
            CAPTURE(unit_heads);
            if (bad != 0) CHECK(bad == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("units and ids close to 2^30 do not overflow") {
  const std::int64_t most = (std::int64_t{1} << 30) - 1;
  const Offsets offsets{0, most};
  const Schedule<64, 0> shorts{rows_of(offsets, most), kAnyLength, 60, 12, 4};
  const auto units = static_cast<std::int32_t>(shorts.num_units());
  CHECK(units == shorts.num_units());
  CHECK((shorts.unit(0).id == shorts.num_ids() - 1 && shorts.unit(0).head == 0));
  CHECK((shorts.unit(units - 1).id == 0 && shorts.unit(units - 1).head == 56));
  CHECK((shorts.unit(units / 5).id == shorts.num_ids() - 1 && shorts.unit(units / 5).head == 12));
  const Tile last = shorts.tile(shorts.first_id(1) + static_cast<std::int32_t>((most - 1) / 64), 1);
  CHECK((last.begin == 0 && last.length == most && last.row == most - 63));
  const Schedule<192, 256> longs{rows_of(offsets, most)};
  CHECK(longs.first_id(2) < longs.num_ids());
  CHECK(longs.tile(static_cast<std::int32_t>((most - 1) / 192), 1).row == (most - 1) / 192 * 192);
}

// --- Garbage

template <int kBlockM, int kLonger>
int escapes(const RaggedRows& rows, std::int32_t longest) {
  const Schedule<kBlockM, kLonger> schedule{rows, longest};
  int bad = schedule.num_ids() < 0;
  for (std::int32_t id = 0; id < schedule.num_ids(); ++id) {
    const std::int32_t segment = find_segment(schedule, id);
    bad += segment < 0 || segment >= rows.num_segments();
    const Tile tile = schedule.tile(id, segment);
    if (tile.length == 0) continue;
    bad += tile.begin < 0 || tile.length < 0 || std::int64_t{tile.begin} + tile.length > rows.total;
    bad += tile.row < 0 || tile.row >= tile.length;
  }
  for (std::int64_t segment = 0; segment < rows.num_segments(); ++segment) {
    const RowRange range = rows.rows(segment);
    if (!is_tiny(range.size(), rows.owned(segment))) continue;
    bad += range.begin < 0 || range.end > rows.total;
  }
  return bad;
}

TEST_CASE("garbage offsets never lead out of the rows, and no search runs for ever") {
  const std::int64_t values[] = {0,
                                 3,
                                 17,
                                 20,
                                 40,
                                 -1,
                                 41,
                                 1000,
                                 std::numeric_limits<std::int64_t>::min(),
                                 std::numeric_limits<std::int64_t>::max()};
  int bad = 0;
  for (const std::int64_t total : {0, 5, 40}) {
    for (const std::int64_t a : values) {
      for (const std::int64_t b : values) {
        for (const std::int64_t c : values) {
          for (const std::int64_t d : values) {
            const Offsets offsets{a, b, c, d};
            const RaggedRows rows = rows_of(offsets, total);
            bad += escapes<2, 0>(rows, kAnyLength) + escapes<3, 0>(rows, 20);
            bad += escapes<2, 4>(rows, kAnyLength) + escapes<3, 20>(rows, kAnyLength);
          }
        }
      }
    }
  }
  CHECK(bad == 0);
}

TEST_CASE("random garbage in many offsets never leads out of the rows either") {
  std::mt19937_64 random(2);
  int bad = 0;
  for (int round = 0; round < 200; ++round) {
    const auto total = static_cast<std::int64_t>(random() % 500);
    Offsets offsets(1 + random() % 300);
    for (std::int64_t& value : offsets) {
      value = round % 2 == 0 ? static_cast<std::int64_t>(random()) : static_cast<std::int64_t>(random() % 700) - 100;
    }
    const RaggedRows rows = rows_of(offsets, total);
    bad += escapes<64, 0>(rows, 256) + escapes<192, 256>(rows, kAnyLength) + escapes<2, 0>(rows, kAnyLength) +
           escapes<3, 17>(rows, kAnyLength);
  }
  CHECK(bad == 0);
}

// --- Searches

TEST_CASE("a warp finds the last entry for which a monotone condition holds") {
  int wrong = 0, slow = 0;
  const auto search = [&](std::int32_t count, std::int32_t answer) {
    const auto [found, probes] = warp_search(count, [&](std::int32_t entry) { return entry <= answer; });
    wrong += found != answer;
    int bound = 0;  // 32 times fewer each time
    for (std::int64_t left = count; left > 1; left = (left + 31) / 32) ++bound;
    slow += probes > bound;
  };
  for (std::int32_t count = 1; count <= 2500; ++count) {
    for (std::int32_t answer = 0; answer < count; ++answer) search(count, answer);
  }
  for (const std::int32_t count : {5000, 32768, 32769}) {
    for (std::int32_t answer = 0; answer < count; ++answer) search(count, answer);
  }
  for (const std::int32_t count : {(1 << 20) + 1, (1 << 30) - 1, 1 << 30}) {
    for (const std::int32_t answer : {0, 1, 31, 32, 33, count / 3, count / 2, count - 33, count - 2, count - 1}) {
      search(count, answer);
    }
  }
  CHECK(wrong == 0);
  CHECK(slow == 0);
}

TEST_CASE("a warp's search ends inside the entries whatever the answers are") {
  std::mt19937 random(3);
  int bad = 0;
  const auto search = [&](std::int32_t count) {
    const auto [found, probes] = warp_search(count, [&](std::int32_t entry) {
      bad += entry <= 0 || entry >= count;  // nothing outside is read; lane 0 does not ask
      return random() % 2 == 0;
    });
    bad += found < 0 || found >= count || probes > 7;
  };
  for (std::int32_t count = 1; count <= 1500; ++count) {
    for (int round = 0; round < 10; ++round) search(count);
  }
  for (int round = 0; round < 1000; ++round) search(1 + static_cast<std::int32_t>(random() % (1u << 30)));
  CHECK(bad == 0);
}

TEST_CASE("without tickets the CTAs take every unit once between them") {
  for (std::int32_t units = 0; units <= 70; ++units) {
    for (std::int32_t ctas = 1; ctas <= 40; ++ctas) {
      std::vector<int> taken(static_cast<std::size_t>(units), 0);
      for (std::int32_t cta = 0; cta < ctas; ++cta) {
        std::int32_t number = cta;
        for (std::int32_t round = 1; number < units; ++round) {  // as the scheduler's loop
          ++taken[static_cast<std::size_t>(number)];
          number = static_unit(round, cta, ctas);
        }
      }
      CAPTURE(units);
      CAPTURE(ctas);
      const auto wrong = std::count_if(taken.begin(), taken.end(), [](int times) { return times != 1; });
      if (wrong != 0) CHECK(wrong == 0);
    }
  }
  for (std::int32_t cta = 0; cta < 264; ++cta) CHECK(static_unit(0, cta, 264) == cta);
}

// --- Keys

// A tile of `warpgroups` times kRows rows against keys in tiles of kBlockN: the number of broken promises.
template <int kBlockN>
int broken_keys(const Mask& mask, std::int32_t length, std::int32_t row, std::int32_t rows, int warpgroups) {
  int bad = 0;
  const std::int32_t tile_end = std::min(row + rows * warpgroups, length);
  const KeyTiles keys = key_tiles<kBlockN>(mask, length, row, rows * warpgroups);
  bad += keys.begin < 0 || keys.begin >= length || keys.count < 1;
  bad += !sees(mask, row, keys.begin);                                     // bits: the first key of the first row
  bad += std::int64_t{keys.begin} + (keys.count - 1) * kBlockN >= length;  // no tile without a key
  for (std::int32_t i = row; i < tile_end; ++i) {
    for (std::int32_t j = 0; j < length; ++j) {
      bad += sees(mask, i, j) && (j < keys.begin || j >= keys.begin + keys.count * kBlockN);
    }
  }
  for (int warpgroup = 0; warpgroup < warpgroups; ++warpgroup) {
    const std::int32_t first = row + rows * warpgroup, end = std::min(first + rows, length);
    const KeySpan span = key_span<kBlockN>(mask, length, first, rows, keys.begin);
    if (first >= length) {
      bad += span.first_tile != span.last_tile;
      continue;
    }
    bad += span.first_tile < 0 || span.first_tile >= span.last_tile || span.last_tile > keys.count;
    bad += span.full_begin < 0 || span.full_end > length;
    const std::int32_t begin_key = keys.begin + span.first_tile * kBlockN;
    const std::int32_t end_key = keys.begin + span.last_tile * kBlockN;
    std::int32_t least = length, most = -1;  // keys that any row sees
    for (std::int32_t i = first; i < end; ++i) {
      for (std::int32_t j = 0; j < length; ++j) {
        if (sees(mask, i, j)) {
          least = std::min(least, j), most = std::max(most, j);
        } else {
          bad += j >= span.full_begin && j < span.full_end;
        }
      }
    }
    bad += least < begin_key || most >= end_key;
    bad += least >= begin_key + kBlockN || most < end_key - kBlockN;  // and no tile more than that
  }
  return bad;
}

TEST_CASE("key tiles hold every key that a row sees, and full ones only such") {
  for (const MaskKind kind : kMaskKinds) {
    for (std::int64_t window = has_window(kind) ? 1 : -1; window <= (has_window(kind) ? 22 : -1); ++window) {
      const Mask mask{kind, window};
      int bad = 0;
      for (std::int32_t length = 1; length <= 20; ++length) {
        for (const std::int32_t rows : {1, 2, 3, 5}) {
          for (int warpgroups = 1; warpgroups <= 3; ++warpgroups) {
            for (std::int32_t row = 0; row < length; row += rows * warpgroups) {
              bad += broken_keys<1>(mask, length, row, rows, warpgroups);
              bad += broken_keys<3>(mask, length, row, rows, warpgroups);
              bad += broken_keys<4>(mask, length, row, rows, warpgroups);
              bad += broken_keys<16>(mask, length, row, rows, warpgroups);
            }
          }
        }
      }
      CAPTURE(static_cast<int>(kind));
      CAPTURE(window);
      CHECK(bad == 0);
    }
  }
}

TEST_CASE("key tiles of the kernels' own sizes, around their borders") {
  int bad = 0;
  for (const MaskKind kind : kMaskKinds) {
    for (const std::int64_t window : {std::int64_t{1}, std::int64_t{63}, std::int64_t{64}, std::int64_t{100},
                                      std::int64_t{200}, std::numeric_limits<std::int64_t>::max()}) {
      if (!has_window(kind) && window != 1) continue;
      const Mask mask{kind, has_window(kind) ? window : -1};
      for (const std::int32_t length : {17, 64, 65, 193, 257}) {
        for (std::int32_t row = 0; row < length; row += 192) bad += broken_keys<112>(mask, length, row, 64, 3);
        for (std::int32_t row = 0; row < length; row += 128) bad += broken_keys<80>(mask, length, row, 64, 2);
        for (std::int32_t row = 0; row < length; row += 64) bad += broken_keys<64>(mask, length, row, 64, 1);
      }
    }
  }
  CHECK(bad == 0);
}

TEST_CASE("a band is whole groups of heads, divides them, and fits half of L2 where one kv head does") {
  int bad = 0;
  bool some_divide = false;
  for (const std::int64_t total : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1000}, std::int64_t{16384},
                                   std::int64_t{1} << 20, (std::int64_t{1} << 30) - 1}) {
    for (const std::int64_t batch : {0, 1, 2, 7, 5000}) {
      const RaggedRows rows{{}, batch, total};
      for (const Mask mask : {Mask{}, Mask{MaskKind::kNull, -1}, Mask{MaskKind::kSlidingWindowCausal, 100},
                              Mask{MaskKind::kSlidingWindowNoncausal, 100}, Mask{MaskKind::kChunked, 1},
                              Mask{MaskKind::kChunkedCausal, std::numeric_limits<std::int64_t>::max() / 2}}) {
        for (std::int32_t kv_heads = 1; kv_heads <= 40; ++kv_heads) {
          for (const std::int32_t group : {1, 2, 5, 8}) {
            for (const std::int32_t head_dim : {64, 72, 128, 256}) {
              const std::int32_t band = heads_in_band(rows, mask, kv_heads, group, head_dim);
              bad += band < group || band % group != 0 || kv_heads * group % band != 0;
              some_divide = some_divide || (band > group && band < kv_heads * group);
            }
          }
        }
      }
    }
  }
  CHECK(bad == 0);
  CHECK(some_divide);
  CHECK(heads_in_band({{}, 1, 1000}, {}, 8, 4, 128) == 32);    // all of them fit
  CHECK(heads_in_band({{}, 1, 16384}, {}, 8, 4, 128) == 8);    // 8 MB a kv head: 3 fit, 2 divide 8
  CHECK(heads_in_band({{}, 1, 1 << 20}, {}, 8, 4, 128) == 4);  // one does not
}

// --- TMA coordinates

TEST_CASE("the coordinates of a row add up to its address, and only those past the sequence's end are out of bounds") {
  std::mt19937_64 random(4);
  int bad = 0;
  const auto check = [&](std::uint64_t base, std::int64_t stride, std::int32_t begin, std::int32_t length,
                         std::int32_t row, std::int64_t element_bytes) {
    const std::int32_t x = ragged_row(length, row), y = ragged_end(begin, length), z = kRaggedWrap;
    const auto x_stride = static_cast<std::uint64_t>(stride * element_bytes);
    const auto z_stride = static_cast<std::uint64_t>((kRaggedSpan - stride) * element_bytes);
    // Sizes of the dimensions: 2^30 and 2^30 + 1 twice; negative coordinates are out of bounds too.
    bad += x < 0 || y < 0 || y > kRaggedWrap || z > kRaggedWrap;
    bad += (x >= kRaggedWrap) != (row >= length);
    bad += base + static_cast<std::uint64_t>(x) * x_stride + static_cast<std::uint64_t>(y) * x_stride +
               static_cast<std::uint64_t>(z) * z_stride !=
           base + static_cast<std::uint64_t>(std::int64_t{begin} + row) * x_stride;
  };
  constexpr std::int32_t kMost = kRaggedWrap - 1;
  for (int round = 0; round < 200000; ++round) {
    const auto begin = static_cast<std::int32_t>(random() % (round % 3 == 0 ? 1000 : kRaggedWrap));
    const auto length = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(kRaggedWrap - begin));
    const auto row =
        static_cast<std::int32_t>(round % 2 == 0 ? random() % (static_cast<std::uint64_t>(length) + 200)
                                                 : static_cast<std::uint64_t>(length) + random() % 3 - (length > 0));
    const auto stride = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(kRaggedSpan));
    check(random() >> 16, round % 5 == 0 ? stride % 4096 : stride, begin, length, row, 2);
  }
  for (const std::int64_t stride : {std::int64_t{0}, std::int64_t{64}, kRaggedSpan - 8}) {
    check(1 << 20, stride, 0, 0, 0, 2);
    check(1 << 20, stride, kMost, 0, 191, 2);
    check(1 << 20, stride, 0, kMost, 0, 2);
    check(1 << 20, stride, 0, kMost, kMost - 1, 2);
    check(1 << 20, stride, 0, kMost, kMost, 2);
    check(1 << 20, stride, 0, kMost, kMost + 1, 2);
  }
  CHECK(bad == 0);
}

}  // namespace
}  // namespace ragged_attention::sm90
