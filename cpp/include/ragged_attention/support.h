// "Will this run, where, and if not, why?" One question, asked by dispatch, error messages, tests and integrations
// alike.
#pragma once

#include <cstdint>
#include <string>

#include "ragged_attention/tensor_view.h"

namespace ragged_attention {

enum class Operation : std::int32_t { kRaggedFlashAttention, kQsaSparseAttention };

struct SupportQuery {
  Operation operation = Operation::kRaggedFlashAttention;
  Device device;
  DType dtype;
  std::int64_t head_dim = 0;
  std::int64_t group = 1;  // num_q_heads / num_kv_heads
};

enum class Path : std::int32_t { kNone, kCpu, kCudaPortable, kCudaSm90 };

struct Support {
  bool ok = false;
  Path path = Path::kNone;
  std::string reason;  // why this path, or why none
};

// Throws CudaError where the driver cannot answer; runs nothing on the device.
Support supports(const SupportQuery& query);

// "cpu", "cuda_portable", "cuda_sm90", "none"
const char* path_name(Path path);

}  // namespace ragged_attention
