// One launch declaration for each instantiation of the Hopper kernels; instantiations/ defines them.
#pragma once

#include "qsa_sparse_attention/cuda/launch.h"

namespace ragged_attention::sm90 {

using StreamHandle = void*;

// Element: cutlass::bfloat16_t or cutlass::half_t. Both may start beside the kernel before them on the stream, which
// must then be the other one: `beside`.
//
// Sequences of more than kQsaShortRows rows.
template <typename Element, int kHeadDim>
void launch_qsa_long(const portable::QsaKernelParams& params, bool beside, int device, StreamHandle stream);

// The others, and the rows of none. `sparse`: there are probably few of them among many rows, so few CTAs look.
template <typename Element, int kHeadDim>
void launch_qsa_short(const portable::QsaKernelParams& params, bool beside, bool sparse, int device,
                      StreamHandle stream);

}  // namespace ragged_attention::sm90
