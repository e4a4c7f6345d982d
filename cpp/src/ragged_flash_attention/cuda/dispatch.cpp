// Host side of the portable kernels: dtype and head dim to an instantiation.
#include <string>

#include "common/cuda/alignment.h"
#include "common/cuda/cutlass_elements.h"
#include "common/cuda/runtime.h"
#include "common/cuda_host.h"
#include "ragged_flash_attention/cuda/launch.h"

namespace ragged_attention {

namespace {

using portable::RaggedKernelParams;

template <typename Element>
void dispatch_head_dim(const RaggedKernelParams& params, int device, void* stream) {
  const int head_dim = params.params.head_dim;
  if (head_dim <= 64) return portable::launch_ragged<Element, 64>(params, device, stream);
  if (head_dim <= 96) return portable::launch_ragged<Element, 96>(params, device, stream);
  if (head_dim <= 128) return portable::launch_ragged<Element, 128>(params, device, stream);
  if (head_dim <= 192) return portable::launch_ragged<Element, 192>(params, device, stream);
  return portable::launch_ragged<Element, 256>(params, device, stream);
}

void dispatch_head_dim_fp32(const RaggedKernelParams& params, int device, void* stream) {
  const int head_dim = params.params.head_dim;
  if (head_dim <= 64) return portable::launch_ragged_fp32<64>(params, device, stream);
  if (head_dim <= 128) return portable::launch_ragged_fp32<128>(params, device, stream);
  return portable::launch_ragged_fp32<256>(params, device, stream);
}

bool aligned(const RaggedTensor& tensor, std::int64_t bytes) {
  return aligned_16(tensor.data, {tensor.row_stride, tensor.head_stride}, bytes);
}

}  // namespace

void ragged_flash_attention_cuda(const RaggedParams& params, int device, void* stream) {
  // Positions within a sequence are 32-bit in the kernels (offsets in memory are not); a block's last tile may look a
  // little past the sequence's end.
  constexpr std::int64_t kMostRows = 0x7fffffff - 4096;
  if (params.rows.total > kMostRows) {
    throw NotImplementedError("q: expected at most " + std::to_string(kMostRows) + " rows on CUDA, got " +
                              std::to_string(params.rows.total) + "; split the batch");
  }
  const std::int64_t bytes = params.dtype.bytes();
  RaggedKernelParams kernel_params{params, {}};
  kernel_params.aligned = {aligned(params.q, bytes), aligned(params.k, bytes), aligned(params.v, bytes),
                           aligned_16(params.out, {params.out_row_stride, params.out_head_stride}, bytes)};
  const DeviceGuard guard(device);
  if (params.dtype == kFloat32) {
    dispatch_head_dim_fp32(kernel_params, device, stream);
  } else if (params.dtype == kBFloat16) {
    dispatch_head_dim<cutlass::bfloat16_t>(kernel_params, device, stream);
  } else {
    dispatch_head_dim<cutlass::half_t>(kernel_params, device, stream);
  }
}

}  // namespace ragged_attention
