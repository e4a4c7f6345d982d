#include "ragged_flash_attention/cuda/kernel.cuh"

namespace ragged_attention::portable {

template void launch_ragged<cutlass::bfloat16_t, 192>(const RaggedKernelParams&, int, StreamHandle);

}  // namespace ragged_attention::portable
