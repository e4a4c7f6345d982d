#include "qsa_sparse_attention/cuda/kernel.cuh"

namespace ragged_attention::portable {

template void launch_qsa<cutlass::bfloat16_t, 256>(const QsaKernelParams&, QsaLaunchShape, int, StreamHandle);

}  // namespace ragged_attention::portable
