// Host side of the Hopper kernels: whether they take a call, and which instantiations.
#include <string>

#include "common/cuda/cutlass_elements.h"
#include "common/cuda/runtime.h"
#include "common/cuda/sm90/tensor_map.h"
#include "common/cuda_host.h"
#include "ragged_flash_attention/sm90/launch.h"

namespace ragged_attention {

namespace {

bool tma_takes(const RaggedTensor& tensor) {
  return sm90::tma_takes(tensor.data, {tensor.row_stride, tensor.head_stride});
}

// The stride of a dimension of size 1 means nothing, and could be anything.
void settle_strides(std::int64_t* row_stride, std::int64_t* head_stride, std::int64_t rows, std::int64_t heads,
                    std::int64_t head_dim) {
  if (heads == 1) *head_stride = head_dim;
  if (rows == 1) *row_stride = heads * *head_stride;
}

// Under a narrow mask, a row's keys are as few as in a short sequence, whatever its length.
bool narrow(const Mask& mask, std::int64_t short_rows) {
  return mask.window > 0 && mask.kind != MaskKind::kSlidingWindowNoncausal && mask.window <= short_rows;
}

template <typename Element, int kHeadDim>
void launch_both(const RaggedParams& params, int device, void* stream) {
  using Tiles = sm90::Tiles<kHeadDim>;
  if (narrow(params.mask, Tiles::kShortRows)) {
    return sm90::launch_ragged_short<Element, kHeadDim>(params, sm90::kAnyLength, false, device, stream);
  }
  const int border = params.mask.is_causal() ? Tiles::kShortCausalRows : Tiles::kShortRows;
  // Only shapes are known here. Where they do not rule out a long sequence, the long kernel has to look.
  if (params.rows.total <= border) {
    return sm90::launch_ragged_short<Element, kHeadDim>(params, border, false, device, stream);
  }
  // The second kernel starts as the first one's CTAs end. First the one that has more to do, as far as one can tell:
  // the other's look at the offsets is then hidden.
  if (params.rows.likely_longest(params.longest_hint) > border) {
    sm90::launch_ragged_long<Element, kHeadDim>(params, border, false, device, stream);
    sm90::launch_ragged_short<Element, kHeadDim>(params, border, true, device, stream);
  } else {
    sm90::launch_ragged_short<Element, kHeadDim>(params, border, false, device, stream);
    sm90::launch_ragged_long<Element, kHeadDim>(params, border, true, device, stream);
  }
}

template <typename Element>
void dispatch_head_dim(const RaggedParams& params, int device, void* stream) {
  switch (params.head_dim) {
    case 64:
      return launch_both<Element, 64>(params, device, stream);
    case 72:  // the columns from 72 on arrive as zeros and are not stored
    case 80:
      return launch_both<Element, 80>(params, device, stream);
    case 96:
      return launch_both<Element, 96>(params, device, stream);
    case 128:
      return launch_both<Element, 128>(params, device, stream);
    case 192:
      return launch_both<Element, 192>(params, device, stream);
    case 256:
      return launch_both<Element, 256>(params, device, stream);
    default:
      throw NotImplementedError("head_dim: no Hopper kernel for " + std::to_string(params.head_dim));
  }
}

}  // namespace

bool ragged_flash_attention_sm90(const RaggedParams& given, int device, void* stream) {
  RaggedParams params = given;
  settle_strides(&params.q.row_stride, &params.q.head_stride, params.rows.total, params.num_q_heads, params.head_dim);
  settle_strides(&params.k.row_stride, &params.k.head_stride, params.rows.total, params.num_kv_heads, params.head_dim);
  settle_strides(&params.v.row_stride, &params.v.head_stride, params.rows.total, params.num_kv_heads, params.head_dim);
  settle_strides(&params.out_row_stride, &params.out_head_stride, params.rows.total, params.num_q_heads,
                 params.head_dim);
  // The softmax takes its maximum before it scales.
  if (!(params.scale > 0)) return false;
  if (!tma_takes(params.q) || !tma_takes(params.k) || !tma_takes(params.v) ||
      !tma_takes({params.out, params.out_row_stride, params.out_head_stride})) {
    return false;
  }
  // Coordinates and tile numbers are 32-bit.
  constexpr std::int64_t kMost = (std::int64_t{1} << 30) - 1;
  if (params.rows.total > kMost || params.rows.batch > kMost ||
      (params.rows.total / 64 + params.rows.batch + 2) * params.num_q_heads > kMost) {
    return false;
  }
  const DeviceGuard guard(device);
  if (params.dtype == kBFloat16) {
    dispatch_head_dim<cutlass::bfloat16_t>(params, device, stream);
  } else {
    dispatch_head_dim<cutlass::half_t>(params, device, stream);
  }
  return true;
}

}  // namespace ragged_attention
