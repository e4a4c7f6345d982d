// A search that a warp makes together. Host+device arithmetic.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace ragged_attention::sm90 {

// Search by a warp for the last of `count` entries that a monotone condition holds for, the first always being one:
// each lane probes one place, and the number of lanes that it holds for narrows the range 32 times.
struct WarpSearch {
  std::int32_t low = 0, high = 1;  // it holds for `low`, and not for `high`

  RAGGED_ATTENTION_HOST_DEVICE bool done() const { return high - low <= 1; }
  RAGGED_ATTENTION_HOST_DEVICE std::int32_t step() const { return (high - low + 31) / 32; }
  // Where a lane probes; not under `high`: it does not hold there.
  RAGGED_ATTENTION_HOST_DEVICE std::int32_t probe(std::int32_t lane) const { return low + lane * step(); }
  RAGGED_ATTENTION_HOST_DEVICE void narrow(std::int32_t lanes_that_hold) {
    const std::int32_t width = step();
    low += (lanes_that_hold > 0 ? lanes_that_hold - 1 : 0) * width;
    high = high - low < width ? high : low + width;
  }
};

}  // namespace ragged_attention::sm90
