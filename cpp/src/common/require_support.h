// The library's own use of supports().
#pragma once

#include <string>

#include "ragged_attention/support.h"

namespace ragged_attention {

// The path, or NotImplementedError with the reason.
Path require_support(const SupportQuery& query);

// What to do where a build has no code for a GPU of this compute capability.
inline std::string advice_for_architecture(int major, int minor) {
  if (major < 8) return "the kernels need compute capability 8.0 or later: pass CPU tensors";
  const std::string architecture = std::to_string(major) + std::to_string(minor) + (major == 9 ? "a-real" : "-real");
  return "rebuild with -C cmake.define.RAGGED_ATTENTION_CUDA_ARCHITECTURES=" + architecture + ", or pass CPU tensors";
}

}  // namespace ragged_attention
