#include "ragged_flash_attention/cuda/kernel.cuh"

namespace ragged_attention::portable {

template void launch_ragged<cutlass::half_t, 64>(const RaggedKernelParams&, int, StreamHandle);

}  // namespace ragged_attention::portable
