#include "ragged_flash_attention/cuda/kernel_fp32.cuh"

namespace ragged_attention::portable {

template void launch_ragged_fp32<256>(const RaggedKernelParams&, int, StreamHandle);

}  // namespace ragged_attention::portable
