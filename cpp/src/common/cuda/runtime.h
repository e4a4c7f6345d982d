// The CUDA runtime for our own .cu files: errors in words, the current device kept.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "ragged_attention/error.h"

namespace ragged_attention {

// Throws CudaError where `status` is an error; `doing` completes "CUDA error while ...".
void check_cuda(cudaError_t status, const char* doing);

// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to restore
};

}  // namespace ragged_attention
