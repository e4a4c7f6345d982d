// One launch declaration for each instantiation of the row-by-row kernels; instantiations/ defines them.
#pragma once

#include <cstdint>

#include "common/cuda/alignment.h"
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

// What the host can say of a call.
inline QsaKernelParams kernel_params(const QsaParams& params) {
  const std::int64_t bytes = params.dtype.bytes();
  const PagedCache& cache = params.cache;
  QsaKernelParams result;
  result.params = params;
  result.out_type = params.out_dtype == kFloat32   ? OutType::kFloat32
                    : params.out_dtype == kFloat16 ? OutType::kFloat16
                                                   : OutType::kBFloat16;
  result.q_aligned = aligned_16(params.q, {params.q_row_stride, params.q_head_stride}, bytes);
  result.kv_aligned = aligned_16(cache.k, {cache.page_stride, cache.token_stride, cache.head_stride}, bytes) &&
                      aligned_16(cache.v, {}, bytes);
  result.out_aligned =
      aligned_16(params.out, {params.out_row_stride, params.out_head_stride}, params.out_dtype.bytes());
  return result;
}

using StreamHandle = void*;

// kHeadDim is the bucket; params.head_dim may be smaller. Element: cutlass::bfloat16_t or cutlass::half_t.
template <typename Element, int kHeadDim>
void launch_qsa(const QsaKernelParams& params, QsaLaunchShape shape, int device, StreamHandle stream);

void launch_qsa_fp32(const QsaKernelParams& params, int device, StreamHandle stream);

}  // namespace ragged_attention::portable
