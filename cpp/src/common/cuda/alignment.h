// Whether a tensor's rows can be copied 16 bytes at a time.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace ragged_attention {

// Base and every stride (in elements of `element_bytes`) land on 16 bytes; the innermost dimension is contiguous and a
// multiple of 8 elements already.
inline bool aligned_16(const void* base, std::initializer_list<std::int64_t> strides, std::int64_t element_bytes) {
  if (reinterpret_cast<std::uintptr_t>(base) % 16 != 0) return false;
  for (const std::int64_t stride : strides) {
    if (stride * element_bytes % 16 != 0) return false;
  }
  return true;
}

}  // namespace ragged_attention
