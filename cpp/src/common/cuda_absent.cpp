// A build without CUDA kernels: supports() has refused every CUDA tensor before any of these could be called.
#include "common/cuda_host.h"
#include "ragged_attention/error.h"

namespace ragged_attention {

namespace {

[[noreturn]] void refuse() { throw NotImplementedError("this build has no CUDA kernels"); }

}  // namespace

std::vector<CudaDeviceInfo> cuda_devices(std::string* problem) {
  *problem = "this build has no CUDA kernels";
  return {};
}

const CudaDeviceInfo& cuda_device_info(int) { refuse(); }
bool cuda_stream_is_capturing(int, void*) { refuse(); }
std::int64_t cuda_first_bad(const OffsetsCheck&, int, void*, Evidence*) { refuse(); }
std::int64_t cuda_first_bad(const SelectionCheck&, int, void*, Evidence*) { refuse(); }
void ragged_flash_attention_cuda(const RaggedParams&, int, void*) { refuse(); }
bool ragged_flash_attention_sm90(const RaggedParams&, int, void*) { refuse(); }
void qsa_sparse_attention_cuda(const QsaParams&, int, void*, std::optional<std::int64_t>, std::optional<std::int64_t>) {
  refuse();
}
bool qsa_sparse_attention_sm90(const QsaParams&, int, void*) { refuse(); }

}  // namespace ragged_attention
