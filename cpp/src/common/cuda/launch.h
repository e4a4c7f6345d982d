// Launching a kernel with its dynamic shared memory; included by .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/cuda/runtime.h"

namespace ragged_attention {

// A grid dimension's limit; kernels walk whatever is left over.
constexpr std::int64_t kMaxGrid = 0x7fffffff;

// Lets `kernel` have so much dynamic shared memory. It is a template argument so that each kernel has its own memory of
// the devices where that was done.
template <auto kernel>
void allow_shared_memory(int bytes, int device) {
  constexpr int kDefault = 48 * 1024;
  if (bytes <= kDefault) return;
  static std::atomic<int> raised[64] = {};  // bytes, by device
  const bool tracked = device < 64;
  if (tracked && raised[device].load(std::memory_order_relaxed) >= bytes) return;
  check_cuda(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
      "raising a kernel's shared memory");
  if (tracked) raised[device].store(bytes, std::memory_order_relaxed);
}

// One launch of `kernel` (a __global__ function of one argument) with `work` blocks on the current device.
// `beside_previous`: it may start once every block of the stream's previous kernel has allowed it to, and waits for its
// end itself (programmatic dependent launch). `cluster`: blocks of a cluster, which divide `work`.
template <auto kernel, typename Params>
void launch(const Params& params, std::int64_t work, int threads, int shared_bytes, int device, cudaStream_t stream,
            const char* doing, bool beside_previous = false, int cluster = 1) {
  allow_shared_memory<kernel>(shared_bytes, device);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(work, kMaxGrid)));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (beside_previous) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), doing);
}

}  // namespace ragged_attention
