// What host code needs of CUDA, without its headers. A build without CUDA kernels links cuda_absent.cpp instead, whose
// versions refuse by name, so that dispatch needs no #ifdef.
#pragma once

#include <cstdint>
#include <optional>

#include "common/check_values.h"
#include "qsa_sparse_attention/params.h"
#include "ragged_attention/build_info.h"
#include "ragged_flash_attention/params.h"

namespace ragged_attention {

// Of one device, cached. Throws CudaError where the driver cannot answer, ValueError where there is no such device.
const CudaDeviceInfo& cuda_device_info(int device);

// Where the stream is being captured into a graph, a synchronisation would invalidate the capture.
bool cuda_stream_is_capturing(int device, void* stream);

// The first bad place of a check on the device, or -1; `evidence` receives what the message needs. Synchronises.
std::int64_t cuda_first_bad(const OffsetsCheck& check, int device, void* stream, Evidence* evidence);
std::int64_t cuda_first_bad(const SelectionCheck& check, int device, void* stream, Evidence* evidence);

// Enqueue on the stream of the device; the caller's current device is left as it was.
void ragged_flash_attention_cuda(const RaggedParams& params, int device, void* stream);

// With the Hopper kernels; false, and nothing enqueued, where they do not take the call (strides that TMA cannot walk,
// a scale of 0 or less) and the portable ones have to.
bool ragged_flash_attention_sm90(const RaggedParams& params, int device, void* stream);

// Warps and unroll force the row-by-row kernel built with them; ValueError lists the built ones.
void qsa_sparse_attention_cuda(const QsaParams& params, int device, void* stream, std::optional<std::int64_t> warps,
                               std::optional<std::int64_t> unroll);

// With the Hopper kernels; false, and nothing enqueued, where they do not take the call (a base or a stride off 16
// bytes) and the row-by-row ones have to.
bool qsa_sparse_attention_sm90(const QsaParams& params, int device, void* stream);

}  // namespace ragged_attention
