// One launch declaration for each instantiation of the row-by-row kernels; instantiations/ defines them.
#pragma once

#include <cstdint>

#include "qsa_sparse_attention/cuda/config.h"
#include "qsa_sparse_attention/params.h"

namespace ragged_attention::portable {

enum class OutType : std::int32_t { kFloat32, kFloat16, kBFloat16 };

struct QsaKernelParams {
  QsaParams params;
  OutType out_type = OutType::kFloat32;  // params.out_dtype, for the device
  bool q_aligned = false;                // 16-byte chunks start on 16 bytes
  bool kv_aligned = false;
  bool out_aligned = false;
  std::int32_t tiles_in_flight = 2;  // unroll / 16
};

using StreamHandle = void*;

// kHeadDim is the bucket; params.head_dim may be smaller. Element: cutlass::bfloat16_t or cutlass::half_t.
template <typename Element, int kHeadDim>
void launch_qsa(const QsaKernelParams& params, QsaLaunchShape shape, int device, StreamHandle stream);

void launch_qsa_fp32(const QsaKernelParams& params, int device, StreamHandle stream);

}  // namespace ragged_attention::portable
