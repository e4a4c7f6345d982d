#include "import_tensor.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ragged_attention/error.h"

namespace nb = nanobind;

namespace ragged_attention {

namespace {

// DLPack's C exchange API, version 1: function pointers that a tensor type publishes as a capsule. It costs tens of
// nanoseconds where __dlpack__() costs microseconds. Only the members we call are typed.
struct ExchangeApi {
  struct {
    std::uint32_t major;
    std::uint32_t minor;
  } version;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* object, nb::dlpack::dltensor* out);  // may be null
  int (*current_work_stream)(int device_type, std::int32_t device, void** stream);
};

constexpr int kDlCpu = 1, kDlCuda = 2, kDlCudaHost = 3, kDlCudaManaged = 13;

const ExchangeApi* exchange_api(nb::handle object) {
  // One entry: calls in a row nearly always bring the same tensor type. Types are kept alive, so an address is a type.
  static PyObject* last_type = nullptr;
  static const ExchangeApi* last_api = nullptr;
  const nb::handle type = object.type();
  if (type.ptr() == last_type) return last_api;
  const ExchangeApi* api = nullptr;
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api->version.major != 1) api = nullptr;
  }
  if (last_type != nullptr) nb::handle(last_type).dec_ref();
  type.inc_ref();
  last_type = type.ptr();
  last_api = api;
  return api;
}

Device device_of(int type, int index) {
  switch (type) {
    case kDlCpu:
    case kDlCudaHost:
      return {DeviceType::kCpu, 0};
    case kDlCuda:
    case kDlCudaManaged:
      return {DeviceType::kCuda, index};
    default:
      return {DeviceType::kOther, type};
  }
}

template <typename Shape, typename Strides>
TensorView view_of(void* data, nb::dlpack::dtype dtype, Device device, std::size_t rank, Shape shape, Strides stride) {
  TensorView view;
  view.data = data;
  view.dtype = {dtype.code, dtype.bits, dtype.lanes};
  view.device = device;
  view.rank = static_cast<int>(rank);
  for (std::size_t i = 0; i < rank && i < TensorView::kMaxRank; ++i) {
    view.shape[i] = shape(i);
    view.strides[i] = stride(i);
  }
  return view;
}

TensorView view_of(const nb::dlpack::dltensor& tensor) {
  std::int64_t packed[TensorView::kMaxRank] = {};
  if (tensor.strides == nullptr) {  // DLPack: row-major
    std::int64_t step = 1;
    for (int i = tensor.ndim - 1; i >= 0; --i) {
      if (i < TensorView::kMaxRank) packed[i] = step;
      step *= tensor.shape[i];
    }
  }
  const std::int64_t* strides = tensor.strides != nullptr ? tensor.strides : packed;
  return view_of(
      static_cast<char*>(tensor.data) + tensor.byte_offset, tensor.dtype,
      device_of(tensor.device.device_type, tensor.device.device_id), static_cast<std::size_t>(tensor.ndim),
      [&](std::size_t i) { return tensor.shape[i]; }, [&](std::size_t i) { return strides[i]; });
}

// The text of an object as it fits into a message: not of any length, and with whatever UTF-8 has no code for escaped.
std::string text_of(nb::handle object) {
  constexpr Py_ssize_t kLongest = 200;
  const nb::object text = nb::steal(PyObject_Str(object.ptr()));
  const nb::object head = nb::steal(text.is_valid() ? PyUnicode_Substring(text.ptr(), 0, kLongest) : nullptr);
  const nb::object bytes =
      nb::steal(head.is_valid() ? PyUnicode_AsEncodedString(head.ptr(), "utf-8", "backslashreplace") : nullptr);
  if (!bytes.is_valid()) {
    PyErr_Clear();
    return "(an object without a text)";
  }
  return PyBytes_AsString(bytes.ptr());
}

std::string class_name(nb::handle object) { return text_of(object.type().attr("__name__")); }

// An exception by its class and words, without its traceback. What is no Exception (KeyboardInterrupt) goes on.
std::string reason_of(const nb::python_error& error) {
  if (!error.matches(PyExc_Exception)) throw error;
  const std::string text = text_of(error.value());
  return class_name(error.value()) + (text.empty() ? "" : ": " + text);
}

[[noreturn]] void no_tensor(nb::handle object, const char* name, const std::string& why = "") {
  const bool none = object.is_none();
  throw TypeError(std::string(name) + ": expected a tensor that speaks DLPack (torch, CuPy, NumPy, ...), got " +
                  (none ? "None" : class_name(object)) + (why.empty() ? "" : ": " + why));
}

nb::handle numpy_array_type() {
  static PyObject* type = nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr();
  return type;
}

// A producer's capsule, its work ordered before `stream`.
nb::object capsule_of(nb::handle object, std::optional<std::uintptr_t> stream) {
  const nb::object method = object.attr("__dlpack__");
  nb::dict keywords;
  const auto device_type = nb::cast<int>(nb::object(object.attr("__dlpack_device__")())[0]);
  if (stream && (device_type == kDlCuda || device_type == kDlCudaManaged)) {
    keywords["stream"] =
        nb::int_(*stream == 0 ? std::uintptr_t{1} : *stream);  // DLPack: 1 is the legacy default stream
  }
  keywords["max_version"] = nb::make_tuple(1, 1);
  try {
    return method(**keywords);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  PyDict_DelItemString(keywords.ptr(), "max_version");  // a producer from before DLPack 1.0
  return method(**keywords);
}

}  // namespace

TensorView packed_view(void* data, DType dtype, Device device, std::int64_t rank, const std::int64_t* shape) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<int>(std::min<std::int64_t>(rank, TensorView::kMaxRank + 1));
  std::uint64_t step = 1;  // unsigned: a shape that is only described may be larger than any memory
  for (int i = std::min(view.rank, TensorView::kMaxRank) - 1; i >= 0; --i) {
    view.shape[i] = shape[i];
    view.strides[i] = static_cast<std::int64_t>(step);
    step *= static_cast<std::uint64_t>(shape[i]);
  }
  return view;
}

TensorView described_tensor(nb::handle object, const char* name) {
  struct Named {
    const char* name;
    DType dtype;
  };
  static constexpr Named kDTypes[] = {
      {"bool", {6, 8, 1}},     {"int8", {0, 8, 1}},   {"int16", {0, 16, 1}},  {"int32", kInt32},
      {"int64", kInt64},       {"uint8", {1, 8, 1}},  {"uint16", {1, 16, 1}}, {"uint32", kUInt32},
      {"uint64", {1, 64, 1}},  {"float16", kFloat16}, {"float32", kFloat32},  {"float64", {2, 64, 1}},
      {"bfloat16", kBFloat16},
  };
  const auto shape = nb::cast<std::vector<std::int64_t>>(nb::object(object[0]));
  const auto dtype = nb::cast<std::string>(nb::object(object[1]));
  const auto* const known = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                         [&](const Named& candidate) { return dtype == candidate.name; });
  if (known == std::end(kDTypes)) throw TypeError(std::string(name) + ": got a tensor of dtype " + dtype);
  return packed_view(nullptr, known->dtype, {}, static_cast<std::int64_t>(shape.size()), shape.data());
}

std::optional<std::uintptr_t> current_stream(nb::handle object, std::int32_t device) {
  const ExchangeApi* api = exchange_api(object);
  if (api == nullptr || api->current_work_stream == nullptr) return std::nullopt;
  void* stream = nullptr;
  if (api->current_work_stream(kDlCuda, device, &stream) != 0) throw nb::python_error();
  return reinterpret_cast<std::uintptr_t>(stream);
}

bool may_be_pending(const nb::dict& tensors) {
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  for (const auto& [name, object] : tensors) {
    if (object.is_none()) continue;
    if (exchange_api(object) == nullptr) return true;
    try {
      if (nb::object(object.attr(nb::handle(requires_grad))).ptr() != Py_False) return true;
      if (nb::object(object.attr(nb::handle(is_neg))()).ptr() != Py_False) return true;
    } catch (const nb::python_error& error) {
      if (!error.matches(PyExc_Exception)) throw;  // KeyboardInterrupt
      return true;                                 // no tensor of torch's
    }
  }
  return false;
}

ImportedTensor import_tensor(nb::handle object, const char* name, Access access, std::optional<std::uintptr_t> stream) {
  ImportedTensor result;
  const ExchangeApi* api = exchange_api(object);
  if (api != nullptr && api->dltensor_from_py_object_no_sync != nullptr) {
    nb::dlpack::dltensor tensor;
    if (api->dltensor_from_py_object_no_sync(object.ptr(), &tensor) != 0) {
      const nb::python_error error;
      no_tensor(object, name, reason_of(error));
    }
    result.view = view_of(tensor);
    return result;
  }

  std::optional<DType> logical;
  nb::object source = nb::borrow(object);
  const bool numpy = PyObject_IsInstance(object.ptr(), numpy_array_type().ptr()) == 1;
  try {
    if (numpy) {
      // NumPy has no bfloat16 of its own, so DLPack can't carry it: take ml_dtypes' arrays as 16-bit integers.
      const nb::object dtype = object.attr("dtype");
      if (nb::cast<std::string>(dtype.attr("kind")) == "V" && nb::cast<std::string>(dtype.attr("name")) == "bfloat16") {
        source = object.attr("view")("uint16");
        logical = kBFloat16;
      }
    } else if (nb::hasattr(object, "__dlpack__") && nb::hasattr(object, "__dlpack_device__")) {
      source = capsule_of(object, stream);
    } else {
      no_tensor(object, name);
    }
  } catch (const nb::python_error& error) {
    no_tensor(object, name, reason_of(error));
  } catch (const nb::cast_error&) {
    no_tensor(object, name, "its __dlpack_device__() gave no pair of integers");
  }

  bool read_only = false;
  if (!nb::try_cast(source, result.owner, false)) {
    PyErr_Clear();  // the reason, in NumPy's words; ours names the argument
    no_tensor(object, name, numpy ? "dtype " + text_of(object.attr("dtype")) : "");
  }
  if (access == Access::kWrite) {
    if (numpy) {
      read_only = !nb::cast<bool>(object.attr("flags").attr("writeable"));
    } else {
      // The first cast consumed the capsule; a second one shows whether the producer lets it be written.
      nb::ndarray<> writable;
      try {
        read_only = !nb::try_cast(capsule_of(object, stream), writable, false);
      } catch (const nb::python_error& error) {
        no_tensor(object, name, reason_of(error));
      } catch (const nb::cast_error&) {
        no_tensor(object, name, "its __dlpack_device__() gave no pair of integers");
      }
      PyErr_Clear();
    }
  }
  const auto& array = result.owner;
  result.view = view_of(
      const_cast<void*>(static_cast<const void*>(array.data())), array.dtype(),
      device_of(array.device_type(), array.device_id()), array.ndim(),
      [&](std::size_t i) { return static_cast<std::int64_t>(array.shape(i)); },
      [&](std::size_t i) { return array.stride(i); });
  if (logical) result.view.dtype = *logical;
  result.view.read_only = read_only;
  return result;
}

}  // namespace ragged_attention
