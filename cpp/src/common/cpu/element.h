// What the ISA-specific kernels are told about element types. Plain data: safe to include where any flags are in force.
#pragma once

#include <cstdint>

namespace ragged_attention {

enum class CpuElement : std::int32_t { kFloat32, kFloat16, kBFloat16 };

}  // namespace ragged_attention
