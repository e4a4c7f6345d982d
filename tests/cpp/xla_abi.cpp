// Holds cpp/bindings/xla_abi.h against XLA's own header, by compiling: jaxlib brings it (jax.ffi.include_dir()). No
// test of CTest, since a build needs no jaxlib; tests/python/test_integration_jax.py compiles it.
#include "bindings/xla_abi.h"

#include "xla/ffi/api/c_api.h"

namespace ours = ragged_attention::xla;

// A member has the offset and the size of XLA's.
#define SAME(Ours, member, Theirs, their_member)                                  \
  static_assert(offsetof(ours::Ours, member) == offsetof(Theirs, their_member) && \
                    sizeof(ours::Ours::member) == sizeof(Theirs::their_member),   \
                #Ours "::" #member)
#define VALUE(ours_, theirs) static_assert(static_cast<long>(ours::ours_) == static_cast<long>(theirs), #ours_)

static_assert(ours::kMajorVersion == XLA_FFI_API_MAJOR);

#if XLA_FFI_API_MINOR >= 4
using XlaExtension = XLA_FFI_InternalExtension;
#else
using XlaExtension = XLA_FFI_Extension_Base;
#endif
SAME(Extension, struct_size, XlaExtension, struct_size);
SAME(Extension, type, XlaExtension, type);
SAME(Extension, next, XlaExtension, next);
VALUE(kMetadataExtension, XLA_FFI_Extension_Metadata);

SAME(ApiVersion, struct_size, XLA_FFI_Api_Version, struct_size);
SAME(ApiVersion, major_version, XLA_FFI_Api_Version, major_version);
SAME(ApiVersion, minor_version, XLA_FFI_Api_Version, minor_version);

VALUE(kInvalidArgument, XLA_FFI_Error_Code_INVALID_ARGUMENT);
VALUE(kUnimplemented, XLA_FFI_Error_Code_UNIMPLEMENTED);
VALUE(kInternal, XLA_FFI_Error_Code_INTERNAL);

VALUE(kPred, XLA_FFI_DataType_PRED);
VALUE(kS8, XLA_FFI_DataType_S8);
VALUE(kS16, XLA_FFI_DataType_S16);
VALUE(kS32, XLA_FFI_DataType_S32);
VALUE(kS64, XLA_FFI_DataType_S64);
VALUE(kU8, XLA_FFI_DataType_U8);
VALUE(kU16, XLA_FFI_DataType_U16);
VALUE(kU32, XLA_FFI_DataType_U32);
VALUE(kU64, XLA_FFI_DataType_U64);
VALUE(kF16, XLA_FFI_DataType_F16);
VALUE(kF32, XLA_FFI_DataType_F32);
VALUE(kF64, XLA_FFI_DataType_F64);
VALUE(kBF16, XLA_FFI_DataType_BF16);

SAME(Buffer, struct_size, XLA_FFI_Buffer, struct_size);
SAME(Buffer, dtype, XLA_FFI_Buffer, dtype);
SAME(Buffer, data, XLA_FFI_Buffer, data);
SAME(Buffer, rank, XLA_FFI_Buffer, rank);
SAME(Buffer, dims, XLA_FFI_Buffer, dims);

SAME(ByteSpan, ptr, XLA_FFI_ByteSpan, ptr);
SAME(ByteSpan, len, XLA_FFI_ByteSpan, len);
SAME(Scalar, dtype, XLA_FFI_Scalar, dtype);
SAME(Scalar, value, XLA_FFI_Scalar, value);
VALUE(kScalarAttribute, XLA_FFI_AttrType_SCALAR);
VALUE(kStringAttribute, XLA_FFI_AttrType_STRING);

SAME(Operands, size, XLA_FFI_Args, size);
SAME(Operands, types, XLA_FFI_Args, types);
SAME(Operands, buffers, XLA_FFI_Args, args);
SAME(Operands, size, XLA_FFI_Rets, size);
SAME(Operands, types, XLA_FFI_Rets, types);
SAME(Operands, buffers, XLA_FFI_Rets, rets);
static_assert(sizeof(ours::Operands) == sizeof(XLA_FFI_Args) && sizeof(ours::Operands) == sizeof(XLA_FFI_Rets));
VALUE(Operands::kBuffer, XLA_FFI_ArgType_BUFFER);
VALUE(Operands::kBuffer, XLA_FFI_RetType_BUFFER);

SAME(Attributes, size, XLA_FFI_Attrs, size);
SAME(Attributes, types, XLA_FFI_Attrs, types);
SAME(Attributes, names, XLA_FFI_Attrs, names);
SAME(Attributes, values, XLA_FFI_Attrs, attrs);
static_assert(sizeof(ours::Attributes) == sizeof(XLA_FFI_Attrs));

SAME(ErrorCreateArguments, message, XLA_FFI_Error_Create_Args, message);
SAME(ErrorCreateArguments, code, XLA_FFI_Error_Create_Args, errc);
static_assert(sizeof(ours::ErrorCreateArguments) >= XLA_FFI_Error_Create_Args_STRUCT_SIZE);
SAME(StreamGetArguments, context, XLA_FFI_Stream_Get_Args, ctx);
SAME(StreamGetArguments, stream, XLA_FFI_Stream_Get_Args, stream);
static_assert(sizeof(ours::StreamGetArguments) == sizeof(XLA_FFI_Stream_Get_Args));
SAME(DeviceOrdinalGetArguments, context, XLA_FFI_DeviceOrdinal_Get_Args, ctx);
SAME(DeviceOrdinalGetArguments, device_ordinal, XLA_FFI_DeviceOrdinal_Get_Args, device_ordinal);
static_assert(sizeof(ours::DeviceOrdinalGetArguments) == sizeof(XLA_FFI_DeviceOrdinal_Get_Args));

SAME(Api, version, XLA_FFI_Api, api_version);
SAME(Api, error_create, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME(Api, stream_get, XLA_FFI_Api, XLA_FFI_Stream_Get);
SAME(Api, device_ordinal_get, XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get);

SAME(CallFrame, extension_start, XLA_FFI_CallFrame, extension_start);
SAME(CallFrame, api, XLA_FFI_CallFrame, api);
SAME(CallFrame, context, XLA_FFI_CallFrame, ctx);
SAME(CallFrame, stage, XLA_FFI_CallFrame, stage);
SAME(CallFrame, arguments, XLA_FFI_CallFrame, args);
SAME(CallFrame, results, XLA_FFI_CallFrame, rets);
SAME(CallFrame, attributes, XLA_FFI_CallFrame, attrs);

SAME(Metadata, version, XLA_FFI_Metadata, api_version);
SAME(Metadata, traits, XLA_FFI_Metadata, traits);
SAME(MetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata);
VALUE(kCommandBufferCompatible, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
