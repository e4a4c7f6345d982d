// A Python object of any framework -> TensorView, through DLPack.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

#include "ragged_attention/tensor_view.h"

namespace ragged_attention {

enum class Access { kRead, kWrite };

// A view and whatever keeps its memory alive. For a framework with DLPack's C exchange API nothing is needed: the
// caller holds the object.
struct ImportedTensor {
  TensorView view;
  nanobind::ndarray<nanobind::ro> owner;
};

// `stream` is the handle the work will run on: a producer orders its own pending work before it. Throws TypeError where
// the object is no tensor.
ImportedTensor import_tensor(nanobind::handle object, const char* name, Access access,
                             std::optional<std::uintptr_t> stream);

// A tensor in row-major order.
TensorView packed_view(void* data, DType dtype, Device device, std::int64_t rank, const std::int64_t* shape);

// A packed tensor without memory from (shape, name of the dtype). Throws TypeError where the dtype is none that DLPack
// frameworks share.
TensorView described_tensor(nanobind::handle object, const char* name);

// False where none of the values can be a torch tensor that requires grad or is lazily negated. Quicker than asking
// from Python, which every call would feel.
bool may_be_pending(const nanobind::dict& tensors);

// The current stream of the object's framework on this device, if the framework has DLPack's C exchange API.
std::optional<std::uintptr_t> current_stream(nanobind::handle object, std::int32_t device);

}  // namespace ragged_attention
