// The C ABI by which XLA calls code that is not its own (its FFI), as far as the handlers in xla.cpp use it.
//
// Declared here instead of taken from jaxlib's headers, so that every build has the handlers: no jaxlib (80 MB) to
// build with, and none hidden from an isolated build. And a handler that is compiled with XLA's own wrappers loads only
// into a jaxlib at least as new as its headers, while what is used here has been the same in all versions from 0.1
// (jaxlib 0.6) to 0.4 (jaxlib 0.11). XLA keeps this ABI: structs say their size and grow at their end alone.
// tests/cpp/xla_abi.cpp holds every offset and every value against the headers of the jaxlib that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ragged_attention::xla {

inline constexpr int kMajorVersion = 0;
inline constexpr int kNewestMinorVersion = 4;  // the newest that the declarations were held against

struct Error;    // opaque; null is success
struct Context;  // opaque; of one call

enum ExtensionType : int { kMetadataExtension = 1 };

struct Extension {
  std::size_t struct_size;
  ExtensionType type;
  Extension* next;
};

struct ApiVersion {
  std::size_t struct_size;
  Extension* extension_start;
  int major_version;
  int minor_version;
};

enum ErrorCode : int { kInvalidArgument = 3, kUnimplemented = 12, kInternal = 13 };

enum DataType : int {
  kPred = 1,
  kS8 = 2,
  kS16 = 3,
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kU16 = 7,
  kU32 = 8,
  kU64 = 9,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kBF16 = 16,
};

// Row-major, as the calls ask for.
struct Buffer {
  std::size_t struct_size;
  Extension* extension_start;
  DataType dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};

struct ByteSpan {
  const char* ptr;
  std::size_t len;
};

struct Scalar {
  DataType dtype;
  void* value;
};

enum AttributeType : int { kScalarAttribute = 3, kStringAttribute = 4 };

struct Operands {
  enum Type : int { kBuffer = 1 };
  std::size_t struct_size;
  Extension* extension_start;
  std::int64_t size;
  Type* types;
  void** buffers;  // Buffer* where the type says so
};

struct Attributes {
  std::size_t struct_size;
  Extension* extension_start;
  std::int64_t size;
  AttributeType* types;
  ByteSpan** names;
  void** values;  // Scalar* or ByteSpan*
};

struct ErrorCreateArguments {
  std::size_t struct_size;
  Extension* extension_start;
  const char* message;
  ErrorCode code;
};

struct StreamGetArguments {
  std::size_t struct_size;
  Extension* extension_start;
  Context* context;
  void* stream;  // out
};

struct DeviceOrdinalGetArguments {
  std::size_t struct_size;
  Extension* extension_start;
  Context* context;
  std::int32_t device_ordinal;  // out
};

using Unused = void*;  // a function that is not called here

struct Api {
  std::size_t struct_size;
  Extension* extension_start;
  ApiVersion version;
  void* internal;
  Error* (*error_create)(ErrorCreateArguments* arguments);
  Unused error_get_message, error_destroy, handler_register;
  Error* (*stream_get)(StreamGetArguments* arguments);
  Unused type_register, context_get, state_set, state_get, device_memory_allocate, device_memory_free;
  Unused thread_pool_schedule, thread_pool_num_threads, future_create, future_set_available, future_set_error;
  Unused run_id_get;
  Error* (*device_ordinal_get)(DeviceOrdinalGetArguments* arguments);
};

struct CallFrame {
  std::size_t struct_size;
  Extension* extension_start;
  const Api* api;
  Context* context;
  int stage;  // always the execution: no handler is given for another
  Operands arguments;
  Operands results;
  Attributes attributes;
};

// The device operations of a call depend on its attributes and shapes alone: it may be captured and replayed.
inline constexpr std::uint32_t kCommandBufferCompatible = 1;

struct Metadata {
  std::size_t struct_size;
  ApiVersion version;
  std::uint32_t traits;
};

// Leads a call that asks for nothing but the handler's metadata.
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

using Handler = Error*(CallFrame* frame);

}  // namespace ragged_attention::xla
