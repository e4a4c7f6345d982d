// What the drivers of the CPU kernels share. Never included by the ISA-specific files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include "common/cpu/element.h"
#include "ragged_attention/tensor_view.h"

namespace ragged_attention {

// The caller has validated the dtype: one of the three.
inline CpuElement cpu_element(DType dtype) {
  if (dtype == kFloat16) return CpuElement::kFloat16;
  if (dtype == kBFloat16) return CpuElement::kBFloat16;
  return CpuElement::kFloat32;
}

// Zero is all bits zero in each of the three types.
inline void fill_zero(void* data, std::int64_t elements, CpuElement element) {
  const std::size_t bytes = static_cast<std::size_t>(elements) * (element == CpuElement::kFloat32 ? 4 : 2);
  __builtin_memset(data, 0, bytes);
}

inline char* element_address(const void* data, std::int64_t offset, CpuElement element) {
  return static_cast<char*>(const_cast<void*>(data)) + offset * (element == CpuElement::kFloat32 ? 4 : 2);
}

// Memory that a thread keeps from task to task: one allocation per thread and size, not one per tile. Cache-line
// aligned.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace() { release(); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* reserve(std::size_t bytes) {
    if (bytes > bytes_) {
      release();
      data_ = ::operator new(bytes, kAlignment);
      bytes_ = bytes;
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};

  void release() {
    if (data_ != nullptr) ::operator delete(data_, kAlignment);
    data_ = nullptr;
    bytes_ = 0;
  }

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace ragged_attention
