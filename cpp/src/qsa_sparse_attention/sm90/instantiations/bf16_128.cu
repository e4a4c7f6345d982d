#include "qsa_sparse_attention/sm90/kernel.cuh"
#include "qsa_sparse_attention/sm90/row_kernel.cuh"

namespace ragged_attention::sm90 {

template void launch_qsa_long<cutlass::bfloat16_t, 128>(const portable::QsaKernelParams&, bool, int, StreamHandle);
template void launch_qsa_short<cutlass::bfloat16_t, 128>(const portable::QsaKernelParams&, bool, bool, int,
                                                         StreamHandle);
template void launch_qsa_rows<cutlass::bfloat16_t, 128>(const portable::QsaKernelParams&, bool, int, StreamHandle);

}  // namespace ragged_attention::sm90
