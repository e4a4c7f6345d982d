#include "common/check_values.h"
#include "common/cuda_host.h"
#include "common/require_support.h"
#include "ragged_flash_attention/validate.h"

namespace ragged_attention {

namespace {

Path path_of(const RaggedParams& params, Device device) {
  return require_support({Operation::kRaggedFlashAttention, device, params.dtype, params.head_dim,
                          params.num_q_heads > 0 ? params.group() : 1});
}

}  // namespace

void check_ragged_flash_attention(const RaggedFlashAttentionArguments& arguments) {
  path_of(validate(arguments), arguments.q.device);
}

void ragged_flash_attention(const RaggedFlashAttentionArguments& arguments) {
  const RaggedParams params = validate(arguments);
  const Device device = arguments.q.device;
  const Path path = path_of(params, device);
  if (arguments.check_values) {
    check_not_capturing(device, arguments.stream);
    check_offsets(params.rows, device, arguments.stream);
  }
  if (!params.has_output()) return;
  if (path == Path::kCpu) {
    ragged_flash_attention_cpu(params);
  } else if (path != Path::kCudaSm90 || !ragged_flash_attention_sm90(params, device.index, arguments.stream)) {
    ragged_flash_attention_cuda(params, device.index, arguments.stream);
  }
}

}  // namespace ragged_attention
