#include "ragged_attention/support.h"

#include "common/cuda_host.h"
#include "common/require_support.h"
#include "ragged_attention/error.h"

namespace ragged_attention {

namespace {

constexpr std::int64_t kMaxHeadDim = 256;

std::string architecture(int major, int minor) { return "sm_" + std::to_string(major) + std::to_string(minor); }

bool has_sm90_kernel(const SupportQuery& query) {
  if (query.dtype == kFloat32) return false;
  if (query.operation == Operation::kQsaSparseAttention) {
    return query.group <= 64 && (query.head_dim == 64 || query.head_dim == 128 || query.head_dim == 256);
  }
  for (const std::int64_t head_dim : {64, 72, 80, 96, 128, 192, 256}) {
    if (query.head_dim == head_dim) return true;
  }
  return false;
}

// The path, and the reason if somebody wants to read it: a call that runs asks on every launch and reads none.
Path decide(const SupportQuery& query, std::string* reason) {
  const auto refused = [&](auto&& text) {
    if (reason != nullptr) *reason = text();
    return Path::kNone;
  };
  if (query.dtype != kFloat32 && query.dtype != kFloat16 && query.dtype != kBFloat16) {
    return refused([&] { return "dtype: expected float32, float16 or bfloat16, got " + to_string(query.dtype); });
  }
  if (query.head_dim < 8 || query.head_dim > kMaxHeadDim || query.head_dim % 8 != 0) {
    return refused([&] {
      return "head_dim: expected a multiple of 8 from 8 to 256, got " + std::to_string(query.head_dim) +
             "; pad q, k and v with zeros to the next multiple of 8 and pass scale explicitly";
    });
  }
  if (query.group < 1) {
    return refused([&] { return "group: expected at least 1, got " + std::to_string(query.group); });
  }
  if (query.device.type == DeviceType::kCpu) {
    if (reason != nullptr) *reason = "CPU backend";
    return Path::kCpu;
  }
  if (query.device.type != DeviceType::kCuda) {
    return refused([&] {
      return "device: expected cpu or cuda, got " + to_string(query.device) + "; copy the tensors to one of them";
    });
  }
  const BuildInfo& build = build_info();
  if (build.cuda_version.empty()) {
    return refused([&] {
      return std::string(
          "this build has no CUDA kernels; install a wheel built with nvcc (the build log says 'CUDA kernels ON'), or "
          "pass CPU tensors");
    });
  }
  const CudaDeviceInfo& info = cuda_device_info(query.device.index);
  if (!info.built_for) {
    return refused([&] {
      return "this build has kernels for " + build.cuda_architectures + ", and " + to_string(query.device) + " (" +
             info.name + ") is " + architecture(info.major, info.minor) + "; " +
             advice_for_architecture(info.major, info.minor);
    });
  }
  if (info.built_for_sm90 && has_sm90_kernel(query)) {
    if (reason != nullptr) *reason = "Hopper kernel on " + architecture(info.major, info.minor);
    return Path::kCudaSm90;
  }
  if (reason != nullptr) *reason = "portable CUDA kernel on " + architecture(info.major, info.minor);
  return Path::kCudaPortable;
}

}  // namespace

const char* path_name(Path path) {
  switch (path) {
    case Path::kCpu:
      return "cpu";
    case Path::kCudaPortable:
      return "cuda_portable";
    case Path::kCudaSm90:
      return "cuda_sm90";
    default:
      return "none";
  }
}

Support supports(const SupportQuery& query) {
  Support support;
  support.path = decide(query, &support.reason);
  support.ok = support.path != Path::kNone;
  return support;
}

Path require_support(const SupportQuery& query) {
  const Path path = decide(query, nullptr);
  if (path == Path::kNone) throw NotImplementedError(supports(query).reason);
  return path;
}

}  // namespace ragged_attention
