// Host side of the row-by-row kernels: dtype and head dim to an instantiation, warps and unroll to a launch shape.
#include <algorithm>
#include <iterator>
#include <string>

#include "common/cuda/cutlass_elements.h"
#include "common/cuda/runtime.h"
#include "common/cuda_host.h"
#include "qsa_sparse_attention/cuda/launch.h"

namespace ragged_attention {

namespace {

using portable::QsaKernelParams;
using portable::QsaLaunchShape;

int bucket(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

template <std::size_t kSize>
void check_built(const char* name, std::int64_t value, const std::int32_t (&built)[kSize]) {
  if (std::find(std::begin(built), std::end(built), value) != std::end(built)) return;
  std::string list;
  for (const std::int32_t one : built) list += (list.empty() ? "" : ", ") + std::to_string(one);
  throw ValueError(std::string(name) + ": expected one of the built values " + list + ", got " + std::to_string(value));
}

QsaLaunchShape launch_shape(int head_dim_bucket, int shared_memory, std::optional<std::int64_t> warps,
                            std::optional<std::int64_t> unroll) {
  QsaLaunchShape shape = portable::qsa_default_shape(head_dim_bucket);
  const auto fits = [&](QsaLaunchShape s) {
    return portable::qsa_shared_bytes(head_dim_bucket, s.warps, s.unroll) <= shared_memory;
  };
  if (warps) {
    check_built("warps", *warps, portable::kQsaWarps);
    shape.warps = static_cast<std::int32_t>(*warps);
  }
  if (unroll) {
    check_built("unroll", *unroll, portable::kQsaUnroll);
    shape.unroll = static_cast<std::int32_t>(*unroll);
  }
  // A GPU with less shared memory than Hopper's shortens what was not asked for: a property of the device, not of the
  // call.
  while (!fits(shape) && !unroll && shape.unroll > portable::kQsaUnroll[0]) shape.unroll /= 2;
  while (!fits(shape) && !warps && shape.warps > portable::kQsaWarps[0]) shape.warps /= 2;
  if (fits(shape)) return shape;
  std::string list;
  for (const std::int32_t w : portable::kQsaWarps) {
    for (const std::int32_t u : portable::kQsaUnroll) {
      if (fits({w, u})) list += (list.empty() ? "(" : ", (") + std::to_string(w) + ", " + std::to_string(u) + ")";
    }
  }
  throw ValueError("warps, unroll: expected a pair that fits this device's shared memory at this head_dim, one of " +
                   list + ", got (" + std::to_string(shape.warps) + ", " + std::to_string(shape.unroll) + ")");
}

template <typename Element>
void dispatch_head_dim(const QsaKernelParams& params, QsaLaunchShape shape, int device, void* stream) {
  switch (bucket(params.params.head_dim)) {
    case 64:
      return portable::launch_qsa<Element, 64>(params, shape, device, stream);
    case 128:
      return portable::launch_qsa<Element, 128>(params, shape, device, stream);
    default:
      return portable::launch_qsa<Element, 256>(params, shape, device, stream);
  }
}

}  // namespace

void qsa_sparse_attention_cuda(const QsaParams& params, int device, void* stream, std::optional<std::int64_t> warps,
                               std::optional<std::int64_t> unroll) {
  QsaKernelParams kernel_params = portable::kernel_params(params);
  const DeviceGuard guard(device);
  if (params.dtype == kFloat32) {
    if (warps) check_built("warps", *warps, {portable::QsaFp32::kWarps});
    if (unroll) check_built("unroll", *unroll, {portable::QsaFp32::kKeys});
    return portable::launch_qsa_fp32(kernel_params, device, stream);
  }
  const QsaLaunchShape shape =
      launch_shape(bucket(params.head_dim), cuda_device_info(device).shared_memory_per_block, warps, unroll);
  kernel_params.tiles_in_flight = shape.unroll / portable::kQsaTileKeys;
  if (params.dtype == kBFloat16) {
    dispatch_head_dim<cutlass::bfloat16_t>(kernel_params, shape, device, stream);
  } else {
    dispatch_head_dim<cutlass::half_t>(kernel_params, shape, device, stream);
  }
}

}  // namespace ragged_attention
