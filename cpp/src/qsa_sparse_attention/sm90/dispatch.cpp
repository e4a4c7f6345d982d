// Host side of the Hopper kernels: whether they take a call, and which instantiations.
#include <string>
#include <utility>

#include "common/cuda/alignment.h"
#include "common/cuda/cutlass_elements.h"
#include "common/cuda/runtime.h"
#include "common/cuda_host.h"
#include "qsa_sparse_attention/sm90/config.h"
#include "qsa_sparse_attention/sm90/launch.h"

namespace ragged_attention {

namespace {

using portable::QsaKernelParams;

// Only shapes are known here: each kernel looks for the sequences that are its own, and where there may be some, it has
// to look. A kernel starts as the CTAs of the one before it end; first come those that probably have most to do.
template <typename Element, int kHeadDim>
void launch_all(const QsaKernelParams& call, int device, void* stream) {
  const QsaParams& params = call.params;
  const RaggedRows& rows = params.rows;
  const bool apart = sm90::qsa_has_apart(params.group());
  const bool has_short = !apart || rows.total > sm90::kQsaApartRows, has_long = rows.total > sm90::kQsaShortRows;
  const std::int64_t longest = rows.likely_longest(params.longest_hint);
  bool beside = false;
  const auto launch_rows = [&](bool sparse) {
    if (apart) sm90::launch_qsa_rows<Element, kHeadDim>(call, std::exchange(beside, true), sparse, device, stream);
  };
  const auto launch_short = [&](bool sparse) {
    if (has_short) sm90::launch_qsa_short<Element, kHeadDim>(call, std::exchange(beside, true), sparse, device, stream);
  };
  const auto launch_long = [&] {
    if (has_long) sm90::launch_qsa_long<Element, kHeadDim>(call, std::exchange(beside, true), device, stream);
  };
  if (longest > sm90::kQsaShortRows) {
    launch_long();
    launch_rows(true);
    launch_short(true);
  } else if (apart && longest <= sm90::kQsaApartRows) {
    launch_rows(false);
    launch_short(true);
    launch_long();
  } else {
    launch_short(false);
    launch_rows(true);
    launch_long();
  }
}

template <typename Element>
void dispatch_head_dim(const QsaKernelParams& params, int device, void* stream) {
  switch (params.params.head_dim) {
    case 64:
      return launch_all<Element, 64>(params, device, stream);
    case 128:
      return launch_all<Element, 128>(params, device, stream);
    case 256:
      return launch_all<Element, 256>(params, device, stream);
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
