#include "common/cuda/sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include "common/cuda/alignment.h"
#include "common/cuda/runtime.h"

namespace ragged_attention::sm90 {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver that is loaded, so that nothing links against libcuda.
Encode driver_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
             "looking up cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess) throw CudaError("the driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<Encode>(function);
}

constexpr std::int64_t kBytes = 2;  // of an element
constexpr std::int64_t kZSpan = std::int64_t{1} << 34;  // elements; z's stride is this less a row's

}  // namespace

bool tma_takes(const void* data, std::int64_t heads, std::int64_t row_stride, std::int64_t head_stride) {
  if (heads == 1) head_stride = 0;  // means nothing, and could be anything
  return aligned_16(data, {row_stride, head_stride}, kBytes) && row_stride >= 0 && head_stride >= 0 &&
         row_stride < kZSpan && head_stride < kZSpan;
}

void encode_ragged(CUtensorMap* map, const void* data, bool is_bfloat16, std::int64_t rows, std::int64_t heads,
                   std::int64_t head_dim, std::int64_t row_stride, std::int64_t head_stride, int box_rows) {
  if (heads == 1) head_stride = head_dim;
  const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(kRaggedWrap), static_cast<cuuint64_t>(rows) + 1,
                               static_cast<cuuint64_t>(kRaggedWrap) + 1};
  const cuuint64_t strides[4] = {static_cast<cuuint64_t>(head_stride * kBytes),
                                 static_cast<cuuint64_t>(row_stride * kBytes),
                                 static_cast<cuuint64_t>(row_stride * kBytes),
                                 static_cast<cuuint64_t>((kZSpan - row_stride) * kBytes)};
  const cuuint32_t box[5] = {64, 1, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  static const Encode encode = driver_encode();
  const CUresult result =
      encode(map, is_bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5,
             const_cast<void*>(data), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw CudaError("CUDA error " + std::to_string(static_cast<int>(result)) + " while encoding a tensor map");
  }
}

}  // namespace ragged_attention::sm90
