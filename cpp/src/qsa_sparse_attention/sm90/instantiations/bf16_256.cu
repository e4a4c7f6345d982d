#include "qsa_sparse_attention/sm90/kernel.cuh"
#include "qsa_sparse_attention/sm90/rows.cuh"

namespace ragged_attention::sm90 {

template void launch_qsa_groups<cutlass::bfloat16_t, 256>(const portable::QsaKernelParams&, bool, int, StreamHandle);
template void launch_qsa_rows<cutlass::bfloat16_t, 256>(const portable::QsaKernelParams&, bool, bool, int,
                                                        StreamHandle);

}  // namespace ragged_attention::sm90
