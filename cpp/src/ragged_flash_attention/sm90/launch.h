// One launch declaration for each instantiation of the Hopper kernels; instantiations/ defines them.
#pragma once

#include "ragged_flash_attention/params.h"
#include "ragged_flash_attention/sm90/config.h"

namespace ragged_attention::sm90 {

using StreamHandle = void*;

// Element: cutlass::bfloat16_t or cutlass::half_t. kHeadDim is the bucket; params.head_dim may be smaller.
//
// Both may start beside the kernel before them on the stream, which must then be the other one: `beside`.
//
// Sequences of more than `longer` rows, which is at least Tiles<kHeadDim>::kShortRows.
template <typename Element, int kHeadDim>
void launch_ragged_long(const RaggedParams& params, std::int32_t longer, bool beside, int device, StreamHandle stream);

// Sequences of at most `longest` rows, and the rows of no sequence up to as many: kAnyLength where there is no long
// kernel in the call.
template <typename Element, int kHeadDim>
void launch_ragged_short(const RaggedParams& params, std::int32_t longest, bool beside, int device,
                         StreamHandle stream);

}  // namespace ragged_attention::sm90
