// Host side of the Hopper kernels: whether they take a call, and which instantiations.
#include <string>

#include "common/cuda/alignment.h"
#include "common/cuda/cutlass_elements.h"
#include "common/cuda/runtime.h"
#include "common/cuda_host.h"
#include "qsa_sparse_attention/sm90/config.h"
#include "qsa_sparse_attention/sm90/launch.h"

namespace ragged_attention {

namespace {

using portable::QsaKernelParams;

template <typename Element, int kHeadDim>
void launch_both(const QsaKernelParams& call, int device, void* stream) {
  const QsaParams& params = call.params;
  // Only shapes are known here. Where they do not rule out a long sequence, the long kernel has to look.
  if (params.rows.total <= sm90::kQsaShortRows) {
    return sm90::launch_qsa_short<Element, kHeadDim>(call, false, false, device, stream);
  }
  // The second kernel starts as the first one's CTAs end. First the one that has more to do, as far as one can tell.
  if (params.rows.likely_longest(params.longest_hint) > sm90::kQsaShortRows) {
    sm90::launch_qsa_long<Element, kHeadDim>(call, false, device, stream);
    sm90::launch_qsa_short<Element, kHeadDim>(call, true, true, device, stream);
  } else {
    sm90::launch_qsa_short<Element, kHeadDim>(call, false, false, device, stream);
    sm90::launch_qsa_long<Element, kHeadDim>(call, true, device, stream);
  }
}

template <typename Element>
void dispatch_head_dim(const QsaKernelParams& params, int device, void* stream) {
  switch (params.params.head_dim) {
    case 64:
      return launch_both<Element, 64>(params, device, stream);
    case 128:
      return launch_both<Element, 128>(params, device, stream);
    case 256:
      return launch_both<Element, 256>(params, device, stream);
    default:
      throw NotImplementedError("head_dim: no Hopper kernel for " + std::to_string(params.params.head_dim));
  }
}

}  // namespace

bool qsa_sparse_attention_sm90(const QsaParams& params, int device, void* stream) {
  const QsaKernelParams call = portable::kernel_params(params);
  if (!call.q_aligned || !call.kv_aligned || !call.out_aligned) return false;
  if (params.row_to_sequence != nullptr) return false;  // groups come from the offsets
  // Numbers of units and CTAs are 32-bit.
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;
  const std::int64_t groups = params.rows.total + params.rows.batch + 2;
  if (params.rows.total > kMost || params.rows.batch > kMost / 2 ||
      groups > kMost / (params.num_kv_heads * sm90::kQsaSplits) || params.cache.page_size > kMost) {
    return false;
  }
  const DeviceGuard guard(device);
  if (params.dtype == kBFloat16) {
    dispatch_head_dim<cutlass::bfloat16_t>(call, device, stream);
  } else {
    dispatch_head_dim<cutlass::half_t>(call, device, stream);
  }
  return true;
}

}  // namespace ragged_attention
