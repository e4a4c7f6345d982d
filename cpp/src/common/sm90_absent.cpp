// A build with CUDA kernels, but not for 90a: supports() never answers with the Hopper path.
#include "common/cuda_host.h"

namespace ragged_attention {

bool ragged_flash_attention_sm90(const RaggedParams&, int, void*) { return false; }
bool qsa_sparse_attention_sm90(const QsaParams&, int, void*) { return false; }

}  // namespace ragged_attention
