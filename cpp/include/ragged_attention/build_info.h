// How this library was built and what it sees here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ragged_attention {

struct BuildInfo {
  std::string version;
  std::string commit;
  std::string compiler;
  std::string cuda_version;        // of the compiler; empty in a build without CUDA kernels
  std::string cuda_architectures;  // "80-real;90a-real"; empty likewise
  std::string cutlass_version;     // empty likewise
};

const BuildInfo& build_info();

struct CudaDeviceInfo {
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  int num_multiprocessors = 0;
  int shared_memory_per_block = 0;  // bytes, with opt-in
  int l2_bytes = 0;
  std::int64_t memory_bytes = 0;
  bool built_for = false;       // whether this build has machine code that runs there
  bool built_for_sm90 = false;  // and Hopper's own kernels among it
};

// Empty in a build without CUDA kernels and on a machine without a GPU or a driver; `problem` then says why.
std::vector<CudaDeviceInfo> cuda_devices(std::string* problem);

}  // namespace ragged_attention
