#include "common/cuda/runtime.h"

#include <memory>
#include <mutex>
#include <vector>

#include "common/cuda_host.h"

namespace ragged_attention {

void check_cuda(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  std::string message = std::string("CUDA error while ") + doing + ": " + cudaGetErrorString(status) + " (" +
                        cudaGetErrorName(status) + ")";
  if (status == cudaErrorInsufficientDriver || status == cudaErrorStubLibrary) {
    message += "; this package was built with CUDA " + build_info().cuda_version +
               " and needs an NVIDIA driver of that major version or newer (R580 for CUDA 13)";
  }
  cudaGetLastError();  // so that the caller's next check does not meet our error
  throw CudaError(message);
}

DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  check_cuda(cudaGetDevice(&current), "reading the current device");
  if (current == device) return;
  check_cuda(cudaSetDevice(device), "selecting the tensors' device");
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "reading a device attribute");
  return value;
}

// Whether this build's machine code runs on a device of this compute capability; with `exactly`, whether code for that
// very architecture and its own instructions ("90a") is there.
bool architecture_built(int major, int minor, bool exactly) {
  // A list like "80-real;90a-real". Machine code runs on the same major version from its own minor version on; an
  // architecture-specific target ("90a") runs on exactly its own.
  const std::string& list = build_info().cuda_architectures;
  std::size_t begin = 0;
  while (begin < list.size()) {
    std::size_t end = list.find(';', begin);
    if (end == std::string::npos) end = list.size();
    const std::string entry = list.substr(begin, end - begin);
    const std::size_t digits = entry.find_first_not_of("0123456789");
    const int number = std::stoi(entry.substr(0, digits));
    const bool specific = digits != std::string::npos && entry[digits] == 'a';
    const bool same = number == major * 10 + minor;
    if (specific ? same : !exactly && number / 10 == major && number % 10 <= minor) return true;
    begin = end + 1;
  }
  return false;
}

CudaDeviceInfo read_device_info(int device) {
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, device), "reading the device's properties");
  CudaDeviceInfo info;
  info.name = properties.name;
  info.major = properties.major;
  info.minor = properties.minor;
  info.num_multiprocessors = properties.multiProcessorCount;
  info.shared_memory_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  info.l2_bytes = properties.l2CacheSize;
  info.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  info.built_for = architecture_built(info.major, info.minor, false);
  info.built_for_sm90 = info.major == 9 && architecture_built(info.major, info.minor, true);
  return info;
}

int device_count() {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count), "counting the devices");
  return count;
}

}  // namespace

const CudaDeviceInfo& cuda_device_info(int device) {
  static std::mutex mutex;
  static auto* cache = new std::vector<std::unique_ptr<CudaDeviceInfo>>();  // outlives static destructors
  const std::lock_guard<std::mutex> lock(mutex);
  if (device < 0 || device >= static_cast<int>(cache->size()) || !(*cache)[device]) {
    const int count = device_count();
    if (device < 0 || device >= count) {
      throw ValueError("device: expected a CUDA device in [0, " + std::to_string(count) + "), got " +
                       std::to_string(device));
    }
    cache->resize(count);
    (*cache)[device] = std::make_unique<CudaDeviceInfo>(read_device_info(device));
  }
  return *(*cache)[device];
}

std::vector<CudaDeviceInfo> cuda_devices(std::string* problem) {
  std::vector<CudaDeviceInfo> devices;
  try {
    const int count = device_count();
    for (int device = 0; device < count; ++device) devices.push_back(cuda_device_info(device));
  } catch (const CudaError& error) {
    *problem = error.what();
    return {};
  }
  return devices;
}

bool cuda_stream_is_capturing(int device, void* stream) {
  const DeviceGuard guard(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "asking the stream for its capture");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace ragged_attention
