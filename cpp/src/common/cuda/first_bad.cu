// check_values=True on the device: every place in parallel, the smallest bad one wins.
#include <cuda_runtime.h>

#include <climits>

#include "common/check_values.h"
#include "common/cuda/runtime.h"
#include "common/cuda_host.h"

namespace ragged_attention {

namespace {

struct Finding {
  unsigned long long place;  // ULLONG_MAX: none
  Evidence evidence;
};

template <typename Check>
__global__ void find_first_bad(Check check, Finding* finding) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t n = check.places();
  Evidence evidence;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    if (check.bad(i, &evidence)) {
      atomicMin(&finding->place, static_cast<unsigned long long>(i));
      return;  // this thread's later places are larger
    }
  }
}

template <typename Check>
__global__ void read_evidence(Check check, Finding* finding) {
  if (finding->place != ULLONG_MAX) check.bad(static_cast<std::int64_t>(finding->place), &finding->evidence);
}

template <typename Check>
std::int64_t run(const Check& check, int device, void* stream_handle, Evidence* evidence) {
  const DeviceGuard guard(device);
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  Finding* finding = nullptr;
  check_cuda(cudaMalloc(&finding, sizeof(Finding)), "allocating memory for check_values");
  Finding result{ULLONG_MAX, {}};
  cudaError_t status = cudaMemcpyAsync(finding, &result, sizeof(Finding), cudaMemcpyHostToDevice, stream);
  if (status == cudaSuccess) {
    find_first_bad<<<1024, 256, 0, stream>>>(check, finding);
    read_evidence<<<1, 1, 0, stream>>>(check, finding);
    status = cudaGetLastError();
  }
  if (status == cudaSuccess) {
    status = cudaMemcpyAsync(&result, finding, sizeof(Finding), cudaMemcpyDeviceToHost, stream);
  }
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  cudaFree(finding);
  check_cuda(status, "checking values on the device");
  *evidence = result.evidence;
  return result.place == ULLONG_MAX ? -1 : static_cast<std::int64_t>(result.place);
}

}  // namespace

std::int64_t cuda_first_bad(const OffsetsCheck& check, int device, void* stream, Evidence* evidence) {
  return run(check, device, stream, evidence);
}

std::int64_t cuda_first_bad(const SelectionCheck& check, int device, void* stream, Evidence* evidence) {
  return run(check, device, stream, evidence);
}

}  // namespace ragged_attention
