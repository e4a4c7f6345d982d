// The arithmetic of QSA's Hopper kernels: groups of rows, shares of a context, plans and the layout of a tile,
// exhaustively over small sizes, over random lists, and with garbage in the offsets.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "common/cuda/sm90/swizzle.h"
#include "common/cuda/sm90/warp_search.h"
#include "offsets.h"
#include "qsa_sparse_attention/sm90/groups.h"
#include "qsa_sparse_attention/sm90/plan.h"
#include "qsa_sparse_attention/sm90/row_plan.h"

namespace ragged_attention::sm90 {
namespace {

template <bool kShort>
std::int64_t find_by_warp(const RowGroups<kShort>& groups, std::int64_t id) {
  WarpSearch search{0, static_cast<std::int32_t>(groups.rows.num_segments())};
  while (!search.done()) {
    int lanes = 0;
    for (std::int32_t lane = 0; lane < 32; ++lane) {
      const std::int32_t probe = search.probe(lane);
      lanes += lane == 0 || (probe < search.high && groups.first_id(probe) <= id);
    }
    search.narrow(lanes);
  }
  return search.low;
}

// Adds the rows of all groups; returns how many promises are broken.
template <bool kShort>
int add_groups(const RaggedRows& rows, int group_rows, const QsaApart& apart, std::vector<int>* met) {
  const RowGroups<kShort> groups{rows, group_rows, apart};
  int bad = 0;
  for (std::int64_t id = 0; id < groups.num_ids(); ++id) {
    const RowGroup group = groups.group(id);
    const RowGroup same = groups.group(id, find_by_warp(groups, id));
    bad += same.rows != group.rows || (group.rows > 0 && same.begin != group.begin);
    if (group.rows == 0) continue;
    const RowRange range = rows.rows(group.segment);
    bad += group.rows > group_rows || group.begin < range.begin || group.begin + group.rows > range.end;
    bad += (group.begin - range.begin) % group_rows != 0;  // counted from the sequence's first row
    bad += group.rows < group_rows && group.begin + group.rows != range.end;
    bad += group.owned != rows.owned(group.segment);
    bad += (!group.owned || range.size() <= kQsaShortRows) != kShort;
    bad += apart.by_rows(range.size(), group.owned);
    for (std::int64_t r = group.begin; r < group.begin + group.rows; ++r) ++(*met)[static_cast<std::size_t>(r)];
  }
  return bad;
}

int broken_groups(const Offsets& offsets, std::int64_t total, int group_rows) {
  const RaggedRows rows = rows_of(offsets, total);
  int bad = 0;
  for (const QsaApart& apart : {QsaApart{}, qsa_apart(12)}) {
    std::vector<int> met(static_cast<std::size_t>(total), 0);
    bad += add_groups<true>(rows, group_rows, apart, &met) + add_groups<false>(rows, group_rows, apart, &met);
    for (std::int64_t segment = 0; segment < rows.num_segments(); ++segment) {  // what goes row by row
      const RowRange range = rows.rows(segment);
      if (!apart.by_rows(range.size(), rows.owned(segment))) continue;
      for (std::int64_t r = range.begin; r < range.end; ++r) ++met[static_cast<std::size_t>(r)];
    }
    for (const int times : met) bad += times != 1;
  }
  return bad;
}

TEST_CASE("groups hold every row once, whatever the offsets") {
  const Offsets borders = {0, 1, 4, 5, 6, 11, 127, 128, 129, 130, 257, 258, 400};
  int bad = 0, calls = 0;
  for (const int group_rows : {1, 2, 5, 10}) {
    for (const int batch : {1, 2, 3, 4}) {
      for_all_offsets(borders, batch, [&](const Offsets& offsets) {
        bad += broken_groups(offsets, 400, group_rows);
        ++calls;
      });
    }
  }
  CHECK(bad == 0);
  CHECK(calls > 5000);
}

TEST_CASE("groups of small calls, exhaustively") {
  Offsets values;
  for (std::int64_t value = 0; value <= 9; ++value) values.push_back(value);
  int bad = 0;
  for (const int group_rows : {1, 3, 4}) {
    for_all_offsets(values, 3, [&](const Offsets& offsets) { bad += broken_groups(offsets, 9, group_rows); });
  }
  CHECK(bad == 0);
}

TEST_CASE("garbage in the offsets makes no group outside the rows") {
  std::mt19937_64 random(1);
  int bad = 0;
  for (int call = 0; call < 2000; ++call) {
    Offsets offsets(1 + random() % 9);
    for (auto& value : offsets) value = static_cast<std::int64_t>(random()) >> (random() % 64);
    const RaggedRows rows = rows_of(offsets, 300);
    const RowGroups<true> short_groups{rows, 5, {}};
    const RowGroups<false> long_groups{rows, 5, {}};
    for (std::int64_t id = 0; id < short_groups.num_ids(); ++id) {
      for (std::int64_t segment = 0; segment < rows.num_segments(); ++segment) {
        for (const RowGroup& group : {short_groups.group(id, segment), long_groups.group(id, segment)}) {
          bad += group.rows > 0 && (group.begin < 0 || group.begin + group.rows > 300 || group.rows > 5);
        }
      }
    }
  }
  CHECK(bad == 0);
}

TEST_CASE("what goes row by row: few rows, the rows of none, and contexts of many windows of a plan") {
  for (int heads = 1; heads <= 64; ++heads) {
    const QsaApart apart = qsa_apart(heads);
    const bool has = heads <= kRowMostHeads;
    const std::int64_t window = 32 * plan_words(qsa_group_rows(heads));
    CHECK(apart.by_rows(kQsaApartRows, true) == has);
    CHECK(apart.by_rows(1000, false) == has);
    CHECK(!apart.by_rows(kQsaApartRows + 1, true));
    CHECK(!apart.by_length(kQsaMostWindows * window));
    CHECK(apart.by_length(kQsaMostWindows * window + 1) == has);
    CHECK(apart.by_length(std::int64_t{1} << 41) == has);
  }
}

template <int kSplits>
int broken_shares() {
  int bad = 0;
  std::vector<std::int32_t> next(kSplits, 0);  // local numbers run from 0 without a gap
  for (std::int32_t token = 0; token < 100000; ++token) {
    int owners = 0;
    for (std::int32_t rank = 0; rank < kSplits; ++rank) {
      const ContextShare<kSplits> share{rank};
      if (!share.owns(token)) continue;
      ++owners;
      bad += share.local(token) != next[static_cast<std::size_t>(rank)]++;
      bad += share.token(share.local(token)) != token;
    }
    bad += owners != 1;
  }
  return bad;
}

TEST_CASE("shares cut a context and a list without gap or overlap") {
  CHECK(broken_shares<1>() == 0);
  CHECK(broken_shares<8>() == 0);
  CHECK(broken_shares<kQsaSplits>() == 0);
  int bad = 0;
  for (std::int32_t count = 0; count < 3000; ++count) {
    bad += list_share(count, kQsaSplits, 0) != 0 || list_share(count, kQsaSplits, kQsaSplits) != count;
    for (std::int32_t rank = 0; rank < kQsaSplits; ++rank) {
      const std::int32_t size = list_share(count, kQsaSplits, rank + 1) - list_share(count, kQsaSplits, rank);
      bad += size < count / kQsaSplits || size > count / kQsaSplits + 1;
    }
  }
  CHECK(bad == 0);
  CHECK(list_share(0x7fffffff, kQsaSplits, kQsaSplits) == 0x7fffffff);
}

TEST_CASE("a plan fits its memory and its 16-bit places") {
  for (std::int32_t rows = 2; rows <= kQsaMaxGroupRows; ++rows) {
    const std::int32_t words = plan_words(rows);
    CHECK(words >= 128);
    CHECK(4 * words * rows <= kQsaPlanBytes);
    CHECK(32 * words <= 0xffff);
  }
  for (int heads = 1; heads <= 64; ++heads) {
    CHECK(qsa_group_rows(heads) >= 1);
    CHECK(qsa_group_rows(heads) * heads <= 64);
  }
}

TEST_CASE("the places of a word's bits, by rank") {
  std::mt19937 random(2);
  int bad = 0;
  std::vector<std::uint16_t> list(kQsaListEntries);
  const auto check = [&](std::uint32_t word, std::int32_t rank, std::int32_t first) {
    std::fill(list.begin(), list.end(), std::uint16_t{0xffff});
    write_places(word, 4096, rank, first, list.data());
    for (std::int32_t entry = 0; entry < kQsaListEntries; ++entry) {
      std::int32_t expected = 0xffff, n = rank;
      for (std::int32_t place = 0; place < 32; ++place) {
        if ((word >> place & 1) != 0 && n++ == first + entry) expected = 4096 + place;
      }
      bad += list[static_cast<std::size_t>(entry)] != expected;
      if (entry == 64) entry = kQsaListEntries - 65;  // the middle stays as it was
    }
    bad += population(word) != static_cast<std::int32_t>(__builtin_popcount(word));
    bad += word != 0 && lowest_bit(word) != __builtin_ctz(word);
  };
  for (const std::uint32_t word : {0u, 1u, 0x80000000u, 0xffffffffu, 0x80000001u, 0x00ffff00u}) {
    for (const std::int32_t first : {0, 5, kQsaListEntries}) {
      for (std::int32_t rank = 0; rank <= 2 * kQsaListEntries; rank += rank < 40 || rank % 1536 > 1490 ? 1 : 97) {
        check(word, rank, first);
      }
    }
  }
  for (int i = 0; i < 2000; ++i) {
    check(static_cast<std::uint32_t>(random()), static_cast<std::int32_t>(random() % 3000),
          kQsaListEntries * static_cast<std::int32_t>(random() % 2));
  }
  CHECK(bad == 0);
}

// What a CTA of a cluster makes of the lists of a group, by the arithmetic of the kernel: windows, words, places.
template <int kSplits>
int broken_plans(const std::vector<std::vector<std::int32_t>>& lists) {
  constexpr std::int32_t kNothingBeyond = std::numeric_limits<std::int32_t>::max();
  const auto rows = static_cast<std::int32_t>(lists.size());
  const std::int32_t words = plan_words(rows);
  int bad = 0;
  std::vector<std::multiset<std::int32_t>> gathered(lists.size());
  std::vector<std::uint16_t> list(kQsaListEntries);
  for (std::int32_t rank = 0; rank < kSplits; ++rank) {
    const ContextShare<kSplits> share{rank};
    std::int32_t base = 0, last = -1;
    while (base != kNothingBeyond) {
      std::vector<std::uint32_t> masks(static_cast<std::size_t>(rows * words), 0);
      std::int32_t beyond = kNothingBeyond;
      for (std::int32_t row = 0; row < rows; ++row) {
        for (const std::int32_t token : lists[static_cast<std::size_t>(row)]) {
          if (!share.owns(token) || share.local(token) < base) continue;
          const std::int32_t place = share.local(token) - base;
          if (place >= 32 * words) {
            beyond = std::min(beyond, place + base);
          } else {
            masks[static_cast<std::size_t>(row * words + place / 32)] |= 1u << place % 32;
          }
        }
      }
      std::int32_t total = 0;
      for (std::int32_t word = 0; word < words; ++word)
        total += population(listed_by_any(masks.data(), rows, words, word));
      for (std::int32_t first = 0; first < total; first += kQsaListEntries) {
        std::int32_t before = 0;
        for (std::int32_t word = 0; word < words; ++word) {
          const std::uint32_t any = listed_by_any(masks.data(), rows, words, word);
          write_places(any, 32 * word, before, first, list.data());
          before += population(any);
        }
        for (std::int32_t entry = 0; entry < std::min(total - first, kQsaListEntries); ++entry) {
          const std::int32_t place = list[static_cast<std::size_t>(entry)], token = share.token(base + place);
          bad += token <= last;  // ascending
          last = token;
          for (std::int32_t row = 0; row < rows; ++row) {
            if (masks[static_cast<std::size_t>(row * words + place / 32)] >> place % 32 & 1) {
              gathered[static_cast<std::size_t>(row)].insert(token);
            }
          }
        }
      }
      base = beyond == kNothingBeyond ? beyond : beyond / 32 * 32;
    }
  }
  for (std::size_t row = 0; row < lists.size(); ++row) {
    bad += gathered[row] != std::multiset<std::int32_t>(lists[row].begin(), lists[row].end());
  }
  return bad;
}

TEST_CASE("a plan gathers what each row lists, once and ascending") {
  std::mt19937 random(4);
  for (const std::int32_t context : {40, 2000, 30000, 300000, 4000000}) {
    for (const int rows : {2, 5, 10}) {
      std::vector<std::vector<std::int32_t>> lists(static_cast<std::size_t>(rows));
      for (auto& list : lists) {
        std::set<std::int32_t> tokens;
        const std::size_t size = random() % std::min(context, 2100);
        while (tokens.size() < size)
          tokens.insert(static_cast<std::int32_t>(random() % static_cast<unsigned>(context)));
        list.assign(tokens.begin(), tokens.end());
        std::shuffle(list.begin(), list.end(), random);
      }
      CHECK(broken_plans<1>(lists) == 0);
      CHECK(broken_plans<kQsaSplits>(lists) == 0);
    }
  }
}

template <int kRows>
int broken_layout(int chunks) {
  int bad = 0;
  std::set<std::uint32_t> seen;
  for (int row = 0; row < kRows; ++row) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const std::uint32_t offset = chunk_offset<kRows>(row, chunk);
      // The definition: bits 4 to 6 of the plain address take those of bits 7 to 9.
      const auto plain =
          static_cast<std::uint32_t>(chunk / 8 * kRows * kBlockRowBytes + row * kBlockRowBytes + chunk % 8 * 16);
      bad += offset != (plain ^ (plain >> 3 & 0x70));
      bad += !seen.insert(offset).second;
      for (int rows = 0; row + rows < kRows; ++rows) {
        if ((row % 8 & rows % 8) != 0 || row % 8 + rows % 8 > 7) continue;
        bad += rows_down(4096 + offset, rows) != 4096 + chunk_offset<kRows>(row + rows, chunk);
      }
    }
  }
  return bad + (seen.size() != static_cast<std::size_t>(kRows * chunks));
}

TEST_CASE("the chunks of a tile are swapped as the matrix products expect") {
  CHECK(broken_layout<64>(32) == 0);
  CHECK(broken_layout<32>(32) == 0);
  CHECK(broken_layout<64>(8) == 0);
  CHECK(broken_layout<16>(32) == 0);
}

// What the workers of a cluster of kCtas have of a row, in the order of their numbers.
template <int kCtas>
int broken_chains(std::int32_t count) {
  constexpr int kWorkers = kCtas * row_workers(kCtas), kChains = kRowChains / kWorkers;
  std::int32_t next = 0, most = 0, least = count;
  int bad = kWorkers * kChains != kRowChains;
  for (int chain = 0; chain < kRowChains; ++chain) {
    const std::int32_t begin = row_chain_begin(count, chain), end = row_chain_begin(count, chain + 1);
    bad += begin != next || end < begin;
    most = std::max(most, end - begin);
    least = std::min(least, end - begin);
    next = end;
  }
  bad += next * std::int64_t{kRowTile} < count || (next - 1) * std::int64_t{kRowTile} >= count || most - least > 1;
  return count == 0 ? next != 0 : bad;
}

TEST_CASE("the chains of a row hold every tile of its list once, as many each as can be") {
  int bad = 0;
  for (std::int32_t count = 0; count < 10000; ++count) {
    bad += broken_chains<1>(count) + broken_chains<2>(count) + broken_chains<4>(count) + broken_chains<8>(count);
  }
  const std::int32_t longest = std::numeric_limits<std::int32_t>::max();
  for (std::int32_t count = longest - 1000; count < longest; ++count) bad += broken_chains<8>(count);
  CHECK(bad == 0);
  CHECK(broken_chains<8>(longest) == 0);
  CHECK(row_chain_begin(2051, 7) == 28);
  CHECK(row_chain_begin(2051, 8) == 33);
}

TEST_CASE("as many CTAs share a row as leave room for all rows") {
  int bad = 0;
  for (const int multiprocessors : {1, 8, 78, 114, 132}) {
    const int room[] = {multiprocessors / 2, multiprocessors / 4, multiprocessors / 9};
    for (std::int64_t units = 1; units < 400; ++units) {
      const int ctas = row_ctas(units, room);
      bad += ctas != 1 && ctas != 2 && ctas != 4 && ctas != 8;
      for (int i = 0; i < 3; ++i) {
        bad += ctas == 2 << i && units > room[i];
        bad += ctas < 2 << i && units <= room[i];
      }
    }
  }
  CHECK(bad == 0);
  CHECK(row_ctas(std::int64_t{1} << 40, {66, 30, 15}) == 1);
}

TEST_CASE("a row's likely sequence is its own where all have as many rows, and one of the batch's anywhere") {
  const auto likely = [](std::int64_t row, std::int64_t batch, std::int64_t total) {
    return likely_sequence(static_cast<std::int32_t>(row), batch,
                           static_cast<float>(batch) / static_cast<float>(total));
  };
  int bad = 0;
  for (std::int64_t rows = 1; rows <= 200; ++rows) {
    for (std::int64_t batch = 1; batch <= 100; ++batch) {
      for (std::int64_t row = 0; row < rows * batch; ++row) bad += likely(row, batch, rows * batch) != row / rows;
    }
  }
  // Of any numbers, the largest among them: a row that is rounded up would be past the last sequence.
  std::mt19937_64 random(2);
  const std::int64_t most = std::numeric_limits<std::int32_t>::max();
  for (int i = 0; i < 100000; ++i) {
    const auto rows =
        static_cast<std::int64_t>(1 + random() % static_cast<std::uint64_t>(most) / (1ull << random() % 31));
    const auto batch = static_cast<std::int64_t>(1 + random() % 1000000);
    for (const std::int64_t row : {std::int64_t{0}, rows / 2, rows - 1}) {
      const std::int64_t sequence = likely(row, batch, rows);
      bad += sequence < 0 || sequence >= batch;
    }
  }
  CHECK(bad == 0);
  CHECK(likely(most - 1, most, most) == most - 1);
  CHECK(likely(7, 0, 8) == -1);
}

}  // namespace
}  // namespace ragged_attention::sm90
