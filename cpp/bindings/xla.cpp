#include "xla.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <string>

#include "import_tensor.h"
#include "ragged_attention/error.h"
#include "ragged_attention/qsa_sparse_attention.h"
#include "ragged_attention/ragged_flash_attention.h"
#include "xla_abi.h"

namespace nb = nanobind;

namespace ragged_attention {

namespace {

constexpr char kRagged[] = "ragged_attention.ragged_flash_attention";
constexpr char kQsa[] = "ragged_attention.qsa_sparse_attention";

DType dtype_of(xla::DataType type) {
  switch (type) {
    case xla::kPred:
      return {6, 8, 1};
    case xla::kS8:
      return {0, 8, 1};
    case xla::kS16:
      return {0, 16, 1};
    case xla::kS32:
      return kInt32;
    case xla::kS64:
      return kInt64;
    case xla::kU8:
      return {1, 8, 1};
    case xla::kU16:
      return {1, 16, 1};
    case xla::kU32:
      return kUInt32;
    case xla::kU64:
      return {1, 64, 1};
    case xla::kF16:
      return kFloat16;
    case xla::kF32:
      return kFloat32;
    case xla::kF64:
      return {2, 64, 1};
    case xla::kBF16:
      return kBFloat16;
  }
  throw TypeError("XLA's element type " + std::to_string(type) + " is none that ragged_attention knows");
}

// One call: its buffers as tensors, its attributes as values.
class Call {
 public:
  Call(xla::CallFrame& frame, DeviceType type) : frame_(frame) {
    device_.type = type;
    if (type != DeviceType::kCuda) return;
    xla::StreamGetArguments stream{sizeof(stream), nullptr, frame.context, nullptr};
    failed_ = frame.api->stream_get(&stream);
    if (failed_ != nullptr) return;
    stream_ = stream.stream;
    xla::DeviceOrdinalGetArguments ordinal{sizeof(ordinal), nullptr, frame.context, 0};
    failed_ = frame.api->device_ordinal_get(&ordinal);
    device_.index = ordinal.device_ordinal;
  }

  xla::Error* failed() const { return failed_; }
  void* stream() const { return stream_; }

  void expect(std::int64_t arguments) const {
    if (frame_.arguments.size == arguments && (frame_.results.size == 1 || frame_.results.size == 2)) return;
    throw ValueError("expected " + std::to_string(arguments) + " operands and 1 or 2 results, got " +
                     std::to_string(frame_.arguments.size) + " and " + std::to_string(frame_.results.size));
  }

  TensorView argument(int i) const { return view(frame_.arguments, i); }
  TensorView out() const { return view(frame_.results, 0); }
  std::optional<TensorView> lse() const {
    if (frame_.results.size < 2) return std::nullopt;
    return view(frame_.results, 1);
  }

  std::optional<std::int64_t> integer(const char* name) const { return scalar<std::int64_t>(name, xla::kS64); }
  std::optional<double> number(const char* name) const { return scalar<double>(name, xla::kF64); }
  std::string text(const char* name) const {
    const void* value = attribute(name, xla::kStringAttribute);
    if (value == nullptr) throw ValueError(std::string(name) + ": expected an attribute of the call, got none");
    const auto& span = *static_cast<const xla::ByteSpan*>(value);
    return {span.ptr, span.len};
  }

 private:
  TensorView view(const xla::Operands& operands, int i) const {
    if (operands.types[i] != xla::Operands::kBuffer)
      throw TypeError("expected a buffer as operand " + std::to_string(i));
    const auto& buffer = *static_cast<const xla::Buffer*>(operands.buffers[i]);
    return packed_view(buffer.data, dtype_of(buffer.dtype), device_, buffer.rank, buffer.dims);
  }

  const void* attribute(const char* name, xla::AttributeType type) const {
    const xla::Attributes& attributes = frame_.attributes;
    for (std::int64_t i = 0; i < attributes.size; ++i) {
      const xla::ByteSpan& given = *attributes.names[i];
      if (given.len != std::strlen(name) || std::memcmp(given.ptr, name, given.len) != 0) continue;
      if (attributes.types[i] == type) return attributes.values[i];
      throw TypeError(std::string(name) + ": expected an attribute of another type");
    }
    return nullptr;
  }

  template <typename Value>
  std::optional<Value> scalar(const char* name, xla::DataType type) const {
    const void* value = attribute(name, xla::kScalarAttribute);
    if (value == nullptr) return std::nullopt;
    const auto& scalar = *static_cast<const xla::Scalar*>(value);
    if (scalar.dtype != type) throw TypeError(std::string(name) + ": expected a 64-bit attribute");
    return *static_cast<const Value*>(scalar.value);
  }

  xla::CallFrame& frame_;
  Device device_;
  void* stream_ = nullptr;
  xla::Error* failed_ = nullptr;
};

void run_ragged(const Call& call) {
  call.expect(4);
  RaggedFlashAttentionArguments arguments;
  arguments.q = call.argument(0);
  arguments.k = call.argument(1);
  arguments.v = call.argument(2);
  arguments.input_row_offsets = call.argument(3);
  arguments.out = call.out();
  arguments.lse = call.lse();
  arguments.mask_str = call.text("mask_str");
  arguments.local_window_size = call.integer("local_window_size").value_or(-1);
  arguments.scale = call.number("scale");
  arguments.q_max_seq_len = call.integer("q_max_seq_len");
  arguments.stream = call.stream();
  ragged_flash_attention(arguments);
}

void run_qsa(const Call& call) {
  call.expect(7);
  QsaSparseAttentionArguments arguments;
  arguments.q = call.argument(0);
  arguments.input_row_offsets = call.argument(1);
  arguments.kv_blocks = call.argument(2);
  arguments.cache_lengths = call.argument(3);
  arguments.kv_lookup_table = call.argument(4);
  arguments.token_indices = call.argument(5);
  arguments.counts = call.argument(6);
  arguments.out = call.out();
  arguments.lse = call.lse();
  arguments.layer_idx = call.integer("layer_idx").value_or(0);
  arguments.scale = call.number("scale");
  arguments.max_prompt_length = call.integer("max_prompt_length");
  arguments.max_cache_length = call.integer("max_cache_length");
  arguments.group = call.integer("group");
  arguments.warps = call.integer("warps");
  arguments.unroll = call.integer("unroll");
  arguments.stream = call.stream();
  qsa_sparse_attention(arguments);
}

xla::Error* error(const xla::CallFrame& frame, xla::ErrorCode code, const char* name, const std::exception& what) {
  const std::string message = std::string(name) + ": " + what.what();
  xla::ErrorCreateArguments arguments{sizeof(arguments), nullptr, message.c_str(), code};
  return frame.api->error_create(&arguments);
}

// XLA asks for the metadata when a handler is registered, and refuses one that speaks a later version than its own, or
// one that it has given up. What is used here is the same in all of them: the answer is the version of the asker.
xla::Error* answer(const xla::CallFrame& frame) {
  xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(frame.extension_start)->metadata;
  const int minor = std::min(frame.api->version.minor_version, xla::kNewestMinorVersion);
  metadata.version = {sizeof(metadata.version), nullptr, xla::kMajorVersion, minor};
  metadata.traits = xla::kCommandBufferCompatible;
  return nullptr;
}

template <void (*run)(const Call&), DeviceType device>
xla::Error* handle(xla::CallFrame* frame) noexcept {
  if (frame->extension_start != nullptr && frame->extension_start->type == xla::kMetadataExtension) {
    return answer(*frame);
  }
  // An exception must not leave into XLA, which has none.
  try {
    const Call call(*frame, device);
    if (call.failed() != nullptr) return call.failed();
    run(call);
    return nullptr;
  } catch (const ValueError& thrown) {
    return error(*frame, xla::kInvalidArgument, "ValueError", thrown);
  } catch (const TypeError& thrown) {
    return error(*frame, xla::kInvalidArgument, "TypeError", thrown);
  } catch (const NotImplementedError& thrown) {
    return error(*frame, xla::kUnimplemented, "NotImplementedError", thrown);
  } catch (const std::exception& thrown) {
    return error(*frame, xla::kInternal, "ragged_attention", thrown);
  }
}

nb::tuple entry(const char* name, const char* platform, xla::Handler* handler) {
  return nb::make_tuple(name, platform, nb::capsule(reinterpret_cast<void*>(handler)));
}

}  // namespace

nb::list xla_handlers() {
  nb::list handlers;
  handlers.append(entry(kRagged, "cpu", &handle<run_ragged, DeviceType::kCpu>));
  handlers.append(entry(kRagged, "CUDA", &handle<run_ragged, DeviceType::kCuda>));
  handlers.append(entry(kQsa, "cpu", &handle<run_qsa, DeviceType::kCpu>));
  handlers.append(entry(kQsa, "CUDA", &handle<run_qsa, DeviceType::kCuda>));
  return handlers;
}

}  // namespace ragged_attention
