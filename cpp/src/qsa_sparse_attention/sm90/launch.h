// Launch declarations for each instantiation of the Hopper kernels; instantiations/ defines them.
#pragma once

#include "qsa_sparse_attention/cuda/launch.h"

namespace ragged_attention::sm90 {

using StreamHandle = void*;

// Element: cutlass::bfloat16_t or cutlass::half_t. `beside`: may start beside the kernel before it on the stream, which
// must then be another one of the same call.
//
// Sequences of more than kQsaShortRows rows.
template <typename Element, int kHeadDim>
void launch_qsa_long(const portable::QsaKernelParams& params, bool beside, int device, StreamHandle stream);

// The others, and the rows of none. `sparse`: there are probably few of them among many rows, so few CTAs look.
template <typename Element, int kHeadDim>
void launch_qsa_short(const portable::QsaKernelParams& params, bool beside, bool sparse, int device,
                      StreamHandle stream);

// Sequences of one row, and the rows of none, where they have a kernel of their own (config.h).
template <typename Element, int kHeadDim>
void launch_qsa_rows(const portable::QsaKernelParams& params, bool beside, int device, StreamHandle stream);

}  // namespace ragged_attention::sm90
