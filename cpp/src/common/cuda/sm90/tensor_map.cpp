#include "common/cuda/sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "common/cuda/alignment.h"
#include "common/cuda/runtime.h"

namespace ragged_attention::sm90 {

namespace {

// From the driver that is loaded, so that nothing links against libcuda.
void* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check_cuda(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found),
             "looking up a driver function");
  if (found != cudaDriverEntryPointSuccess) throw CudaError(std::string("the driver has no ") + name);
  return function;
}

void check_driver(CUresult result, const char* doing) {
  if (result == CUDA_SUCCESS) return;
  throw CudaError("CUDA error " + std::to_string(static_cast<int>(result)) + " while " + doing);
}

constexpr std::int64_t kBytes = 2;  // of an element

void encode(CUtensorMap* map, const RaggedBoxes& boxes, void* data) {
  const std::int64_t rows = boxes.row_stride;
  const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(boxes.head_dim), static_cast<cuuint64_t>(boxes.heads),
                               static_cast<cuuint64_t>(kRaggedWrap), static_cast<cuuint64_t>(kRaggedWrap) + 1,
                               static_cast<cuuint64_t>(kRaggedWrap) + 1};
  const cuuint64_t strides[4] = {static_cast<cuuint64_t>(boxes.head_stride * kBytes),
                                 static_cast<cuuint64_t>(rows * kBytes), static_cast<cuuint64_t>(rows * kBytes),
                                 static_cast<cuuint64_t>((kRaggedSpan - rows) * kBytes)};
  const cuuint32_t box[5] = {64, 1, static_cast<cuuint32_t>(boxes.box_rows), 1, 1};
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  static const auto function =
      reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(driver_function("cuTensorMapEncodeTiled"));
  // The driver wants a context in this thread, and the runtime makes one only when it first needs it itself.
  int device = 0;
  check_cuda(cudaGetDevice(&device), "reading the current device");
  check_cuda(cudaSetDevice(device), "making a thread's context");
  check_driver(
      function(map, boxes.is_bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5, data,
               sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      "encoding a tensor map");
}

}  // namespace

bool tma_takes(const void* data, const RaggedBoxes& boxes) {
  return aligned_16(data, {boxes.row_stride, boxes.head_stride}, kBytes) && boxes.row_stride > 0 &&
         boxes.head_stride > 0 && boxes.row_stride < kRaggedSpan && boxes.head_stride < kRaggedSpan;
}

void encode_ragged(CUtensorMap* map, const void* data, const RaggedBoxes& boxes) {
  // A model calls with a few shapes, and its allocator hands out the same addresses over and over: descriptors are
  // kept, by each thread for itself. Where only the address is new, the rest of one is taken over.
  struct Entry {
    RaggedBoxes boxes;
    const void* data;
    CUtensorMap map;
  };
  struct Set {
    Entry entries[4];
    unsigned oldest;
  };
  constexpr std::size_t kSets = 32;
  static thread_local Set sets[kSets] = {};
  const std::size_t hash = static_cast<std::size_t>(boxes.row_stride * 7 + boxes.head_stride * 5 + boxes.heads * 3 +
                                                    boxes.box_rows + boxes.head_dim + boxes.is_bfloat16);
  Set& set = sets[(hash ^ hash >> 6 ^ hash >> 12) % kSets];
  const Entry* alike = nullptr;
  for (const Entry& entry : set.entries) {
    if (!(entry.boxes == boxes)) continue;
    if (entry.data == data) {
      *map = entry.map;
      return;
    }
    alike = &entry;
  }
  if (alike == nullptr) {
    encode(map, boxes, const_cast<void*>(data));
  } else {
    static const auto replace =
        reinterpret_cast<decltype(&cuTensorMapReplaceAddress)>(driver_function("cuTensorMapReplaceAddress"));
    *map = alike->map;
    check_driver(replace(map, const_cast<void*>(data)), "changing a tensor map's address");
  }
  set.entries[set.oldest++ % 4] = {boxes, data, *map};
}

}  // namespace ragged_attention::sm90
