// check_values=True: what only the device can see, as one predicate per place, run on the host or on the device alike.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/ragged.h"
#include "qsa_sparse_attention/params.h"
#include "ragged_attention/tensor_view.h"

namespace ragged_attention {

// What an error message says about a bad place.
struct Evidence {
  std::int64_t value = 0;
  std::int64_t other = 0;  // meaning depends on the check: see each one
  bool has_other = false;
};

// Place i: input_row_offsets[i] lies in [0, total] and not under its predecessor (which is `other`).
struct OffsetsCheck {
  RaggedRows rows;

  RAGGED_ATTENTION_HOST_DEVICE std::int64_t places() const { return rows.batch + 1; }

  RAGGED_ATTENTION_HOST_DEVICE bool bad(std::int64_t i, Evidence* evidence) const {
    evidence->value = rows.offsets[i];
    evidence->other = i > 0 ? rows.offsets[i - 1] : 0;
    return evidence->value < 0 || evidence->value > rows.total || evidence->value < evidence->other;
  }
};

// Places in order: the counts of all rows (other = row), the cache lengths (other = sequence), then every listed entry
// row by row (value = the token; other = the page id where the page is what is wrong).
struct SelectionCheck {
  QsaParams params;

  enum class Kind : std::int32_t { kCount, kCacheLength, kEntry };
  struct Place {
    Kind kind;
    std::int64_t row;     // or the sequence, for kCacheLength
    std::int64_t column;  // for kEntry
  };

  RAGGED_ATTENTION_HOST_DEVICE std::int64_t places() const {
    return params.rows.total * (1 + params.selection_width) + params.rows.batch;
  }

  RAGGED_ATTENTION_HOST_DEVICE Place place(std::int64_t i) const {
    if (i < params.rows.total) return {Kind::kCount, i, 0};
    i -= params.rows.total;
    if (i < params.rows.batch) return {Kind::kCacheLength, i, 0};
    i -= params.rows.batch;
    return {Kind::kEntry, i / params.selection_width, i % params.selection_width};
  }

  RAGGED_ATTENTION_HOST_DEVICE bool bad(std::int64_t i, Evidence* evidence) const {
    const Place p = place(i);
    evidence->has_other = false;
    switch (p.kind) {
      case Kind::kCount:
        evidence->value = params.counts[p.row * params.counts_stride];
        return evidence->value < 0 || evidence->value > params.selection_width;
      case Kind::kCacheLength:
        evidence->value = params.cache_lengths[p.row];
        return evidence->value < 0;
      default: {
        if (p.column >= params.count(p.row)) return false;
        const QsaParams::RowSource source = params.source(p.row);
        if (source.sequence < 0) return false;  // a row that no sequence owns reads nothing
        const std::int64_t token = params.token_indices[p.row * params.token_indices_row_stride + p.column];
        evidence->value = token;
        if (token_offset(params.cache, source.sequence, token, source.length) != kNotListed) return false;
        if (token >= 0 && token < source.length && token / params.cache.page_size < params.cache.max_pages) {
          evidence->other = params.cache.lookup_table.at(source.sequence, token / params.cache.page_size);
          evidence->has_other = true;
        }
        return true;
      }
    }
  }
};

// On the host.
template <typename Check>
std::int64_t first_bad(const Check& check, Evidence* evidence) {
  const std::int64_t n = check.places();
  for (std::int64_t i = 0; i < n; ++i) {
    if (check.bad(i, evidence)) return i;
  }
  return -1;
}

// check_values synchronises, which a stream under capture does not allow: ValueError.
void check_not_capturing(Device device, void* stream);

// check_values for the offsets of either operation: ValueError with the first bad place.
void check_offsets(const RaggedRows& rows, Device device, void* stream);

}  // namespace ragged_attention
