// Offsets, lengths and page tables come as uint32, int32 or int64 and with any stride: read them all as int64.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace ragged_attention {

enum class IntegerType : std::int32_t { kI32, kU32, kI64 };

struct IntegerArray {
  const void* data = nullptr;
  std::int64_t stride = 1;  // in elements
  IntegerType type = IntegerType::kI32;

  RAGGED_ATTENTION_HOST_DEVICE std::int64_t operator[](std::int64_t i) const {
    switch (type) {
      case IntegerType::kI32:
        return static_cast<const std::int32_t*>(data)[i * stride];
      case IntegerType::kU32:
        return static_cast<const std::uint32_t*>(data)[i * stride];
      default:
        return static_cast<const std::int64_t*>(data)[i * stride];
    }
  }
};

// A matrix of them: a page table.
struct IntegerMatrix {
  IntegerArray row0;
  std::int64_t row_stride = 0;  // in elements

  RAGGED_ATTENTION_HOST_DEVICE std::int64_t at(std::int64_t row, std::int64_t column) const {
    const std::int64_t step = row0.stride;
    switch (row0.type) {
      case IntegerType::kI32:
        return static_cast<const std::int32_t*>(row0.data)[row * row_stride + column * step];
      case IntegerType::kU32:
        return static_cast<const std::uint32_t*>(row0.data)[row * row_stride + column * step];
      default:
        return static_cast<const std::int64_t*>(row0.data)[row * row_stride + column * step];
    }
  }
};

}  // namespace ragged_attention
