#include "ragged_flash_attention/sm90/kernel.cuh"

namespace ragged_attention::sm90 {

template void launch_ragged_long<cutlass::half_t, 192>(const RaggedParams&, std::int32_t, bool, int, StreamHandle);
template void launch_ragged_short<cutlass::half_t, 192>(const RaggedParams&, std::int32_t, bool, int, StreamHandle);

}  // namespace ragged_attention::sm90
