// One launch declaration for each instantiation of the portable kernels; instantiations/ defines them.
#pragma once

#include <cstdint>

#include "ragged_flash_attention/params.h"

namespace ragged_attention::portable {

// Whether 16-byte chunks of each operand start on 16 bytes; where not, the kernel copies element by element.
struct RaggedAlignment {
  bool q = false, k = false, v = false, out = false;
};

struct RaggedKernelParams {
  RaggedParams params;
  RaggedAlignment aligned;
};

using StreamHandle = void*;

// kHeadDim is the bucket; params.head_dim may be smaller. Element: cutlass::bfloat16_t or cutlass::half_t.
template <typename Element, int kHeadDim>
void launch_ragged(const RaggedKernelParams& params, int device, StreamHandle stream);

template <int kHeadDim>
void launch_ragged_fp32(const RaggedKernelParams& params, int device, StreamHandle stream);

}  // namespace ragged_attention::portable
