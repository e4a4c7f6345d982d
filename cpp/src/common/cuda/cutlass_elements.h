// CUTLASS's element types by name alone, for host files that dispatch on them: its headers are for the kernels.
#pragma once

namespace cutlass {
struct bfloat16_t;
struct half_t;
}  // namespace cutlass
