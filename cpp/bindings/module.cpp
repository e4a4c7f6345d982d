// The only nanobind code: Python objects in, the public C++ functions called with the GIL released, exceptions out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "common/cpu_features.h"
#include "common/thread_pool.h"
#include "import_tensor.h"
#include "ragged_attention/build_info.h"
#include "ragged_attention/error.h"
#include "ragged_attention/qsa_sparse_attention.h"
#include "ragged_attention/ragged_flash_attention.h"
#include "ragged_attention/support.h"
#include "xla.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace ra = ragged_attention;

namespace {

// What stands for the operands of a call: tensors, or descriptions (shape, name of the dtype), of which a call checks
// what can be checked and computes nothing.
enum class Given { kTensors, kDescriptions };

// The operands of one call: imported one by one, alive until the call is over.
template <Given given>
class Operands {
 public:
  explicit Operands(std::optional<std::uintptr_t> stream) : stream_(stream) {}

  ra::TensorView read(nb::handle object, const char* name) { return add(object, name, ra::Access::kRead); }
  ra::TensorView write(nb::handle object, const char* name) { return add(object, name, ra::Access::kWrite); }

  std::optional<ra::TensorView> write_optional(nb::handle object, const char* name) {
    if (object.is_none()) return std::nullopt;
    return write(object, name);
  }

  void* stream() const { return reinterpret_cast<void*>(stream_.value_or(0)); }

 private:
  static constexpr int kMost = 10;  // of any operation

  ra::TensorView add(nb::handle object, const char* name, ra::Access access) {
    if constexpr (given == Given::kDescriptions) {
      ra::TensorView view = ra::described_tensor(object, name);
      view.data = reinterpret_cast<void*>(address_);  // never followed; apart from each other, as the checks want it
      auto bytes = static_cast<std::uintptr_t>(view.dtype.bytes());
      for (int i = 0; i < view.rank && i < ra::TensorView::kMaxRank; ++i) {
        bytes *= static_cast<std::uintptr_t>(view.shape[i]);
      }
      address_ += (bytes / 256 + 1) * 256;
      return view;
    }
    operands_[size_] = ra::import_tensor(object, name, access, stream_);
    return operands_[size_++].view;
  }

  std::optional<std::uintptr_t> stream_;
  ra::ImportedTensor operands_[kMost];
  int size_ = 0;
  std::uintptr_t address_ = 256;
};

template <Given given>
void ragged_flash_attention(nb::handle q, nb::handle k, nb::handle v, nb::handle input_row_offsets, nb::handle out,
                            nb::handle lse, const std::string& mask_str, std::int64_t local_window_size,
                            std::optional<double> scale, std::optional<std::int64_t> q_max_seq_len,
                            std::optional<std::uintptr_t> stream, bool check_values) {
  Operands<given> operands(stream);
  ra::RaggedFlashAttentionArguments arguments;
  arguments.q = operands.read(q, "q");
  arguments.k = operands.read(k, "k");
  arguments.v = operands.read(v, "v");
  arguments.input_row_offsets = operands.read(input_row_offsets, "input_row_offsets");
  arguments.out = operands.write(out, "out");
  arguments.lse = operands.write_optional(lse, "lse");
  arguments.mask_str = mask_str;
  arguments.local_window_size = local_window_size;
  arguments.scale = scale;
  arguments.q_max_seq_len = q_max_seq_len;
  arguments.stream = operands.stream();
  arguments.check_values = check_values;
  if constexpr (given == Given::kDescriptions) return ra::check_ragged_flash_attention(arguments);
  const nb::gil_scoped_release release;
  ra::ragged_flash_attention(arguments);
}

template <Given given>
void qsa_sparse_attention(nb::handle q, nb::handle input_row_offsets, nb::handle kv_blocks, nb::handle cache_lengths,
                          nb::handle kv_lookup_table, std::int64_t layer_idx, nb::handle token_indices,
                          nb::handle counts, nb::handle out, nb::handle lse, std::int64_t page_stride,
                          std::optional<double> scale, std::optional<std::int64_t> max_prompt_length,
                          std::optional<std::int64_t> max_cache_length, std::optional<std::int64_t> group,
                          std::optional<std::int64_t> warps, std::optional<std::int64_t> unroll,
                          std::optional<std::uintptr_t> stream, bool check_values) {
  Operands<given> operands(stream);
  ra::QsaSparseAttentionArguments arguments;
  arguments.q = operands.read(q, "q");
  arguments.input_row_offsets = operands.read(input_row_offsets, "input_row_offsets");
  arguments.kv_blocks = operands.read(kv_blocks, "kv_blocks");
  arguments.cache_lengths = operands.read(cache_lengths, "cache_lengths");
  arguments.kv_lookup_table = operands.read(kv_lookup_table, "kv_lookup_table");
  arguments.layer_idx = layer_idx;
  arguments.token_indices = operands.read(token_indices, "token_indices");
  arguments.counts = operands.read(counts, "counts");
  arguments.out = operands.write(out, "out");
  arguments.lse = operands.write_optional(lse, "lse");
  arguments.page_stride = page_stride;
  arguments.scale = scale;
  arguments.max_prompt_length = max_prompt_length;
  arguments.max_cache_length = max_cache_length;
  arguments.group = group;
  arguments.warps = warps;
  arguments.unroll = unroll;
  arguments.stream = operands.stream();
  arguments.check_values = check_values;
  if constexpr (given == Given::kDescriptions) return ra::check_qsa_sparse_attention(arguments);
  const nb::gil_scoped_release release;
  ra::qsa_sparse_attention(arguments);
}

void qsa_sparse_paged_attention(nb::handle q, nb::handle k_cache, nb::handle v_cache, nb::handle logical_indices,
                                nb::handle block_table, nb::handle token_to_req, nb::handle query_start_loc,
                                nb::handle seq_lens, nb::handle out, std::optional<double> scale,
                                std::optional<std::uintptr_t> stream) {
  Operands<Given::kTensors> operands(stream);
  ra::QsaSparsePagedAttentionArguments arguments;
  arguments.q = operands.read(q, "q");
  arguments.k_cache = operands.read(k_cache, "k_cache");
  arguments.v_cache = operands.read(v_cache, "v_cache");
  arguments.logical_indices = operands.read(logical_indices, "logical_indices");
  arguments.block_table = operands.read(block_table, "block_table");
  if (!token_to_req.is_none()) arguments.token_to_req = operands.read(token_to_req, "token_to_req");
  if (!query_start_loc.is_none()) arguments.query_start_loc = operands.read(query_start_loc, "query_start_loc");
  if (!seq_lens.is_none()) arguments.seq_lens = operands.read(seq_lens, "seq_lens");
  arguments.out = operands.write(out, "out");
  arguments.scale = scale;
  arguments.stream = operands.stream();
  const nb::gil_scoped_release release;
  ra::qsa_sparse_paged_attention(arguments);
}

ra::DType dtype_named(const std::string& name) {
  for (const ra::DType dtype : {ra::kFloat32, ra::kFloat16, ra::kBFloat16}) {
    if (name == ra::to_string(dtype)) return dtype;
  }
  throw ra::TypeError("dtype: expected float32, float16 or bfloat16, got " + name);
}

std::tuple<bool, std::string, std::string> supports(const std::string& operation, bool cuda, std::int32_t device,
                                                    const std::string& dtype, std::int64_t head_dim,
                                                    std::int64_t group) {
  ra::SupportQuery query;
  if (operation == "ragged_flash_attention") {
    query.operation = ra::Operation::kRaggedFlashAttention;
  } else if (operation == "qsa_sparse_attention") {
    query.operation = ra::Operation::kQsaSparseAttention;
  } else {
    throw ra::ValueError("op: expected 'ragged_flash_attention' or 'qsa_sparse_attention', got '" + operation + "'");
  }
  query.device = {cuda ? ra::DeviceType::kCuda : ra::DeviceType::kCpu, device};
  query.dtype = dtype_named(dtype);
  query.head_dim = head_dim;
  query.group = group;
  const ra::Support support = ra::supports(query);
  return {support.ok, ra::path_name(support.path), support.reason};
}

nb::dict build_info() {
  const ra::BuildInfo& info = ra::build_info();
  nb::dict result;
  result["version"] = info.version;
  result["commit"] = info.commit;
  result["compiler"] = info.compiler;
  result["cuda_version"] = info.cuda_version;
  result["cuda_architectures"] = info.cuda_architectures;
  result["cutlass_version"] = info.cutlass_version;
  result["cpu_isa"] = ra::cpu_isa_name();
  return result;
}

nb::dict cuda_devices() {
  std::string problem;
  nb::list devices;
  for (const ra::CudaDeviceInfo& info : ra::cuda_devices(&problem)) {
    nb::dict device;
    device["name"] = info.name;
    device["compute_capability"] = nb::make_tuple(info.major, info.minor);
    device["num_multiprocessors"] = info.num_multiprocessors;
    device["shared_memory_per_block"] = info.shared_memory_per_block;
    device["l2_bytes"] = info.l2_bytes;
    device["memory_bytes"] = info.memory_bytes;
    devices.append(device);
  }
  nb::dict result;
  result["devices"] = devices;
  result["problem"] = problem;
  return result;
}

}  // namespace

NB_MODULE(_C, m) {
  m.doc() = "Compiled half of ragged_attention. Use the package's own functions.";

  static PyObject* cuda_error = PyErr_NewExceptionWithDoc(
      "ragged_attention.CudaError", "An error of the CUDA driver or runtime itself.", PyExc_RuntimeError, nullptr);
  m.attr("CudaError") = nb::borrow(cuda_error);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const ra::ValueError& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const ra::TypeError& error) {
      PyErr_SetString(PyExc_TypeError, error.what());
    } catch (const ra::NotImplementedError& error) {
      PyErr_SetString(PyExc_NotImplementedError, error.what());
    } catch (const ra::CudaError& error) {
      PyErr_SetString(cuda_error, error.what());
    }
  });

  const auto define_ragged = [&](const char* name, auto* function) {
    m.def(name, function, "q"_a.none(), "k"_a.none(), "v"_a.none(), "input_row_offsets"_a.none(), "out"_a.none(),
          "lse"_a.none(), "mask_str"_a, "local_window_size"_a, "scale"_a.none(), "q_max_seq_len"_a.none(),
          "stream"_a.none(), "check_values"_a);
  };
  define_ragged("ragged_flash_attention", &ragged_flash_attention<Given::kTensors>);
  define_ragged("check_ragged_flash_attention", &ragged_flash_attention<Given::kDescriptions>);
  const auto define_qsa = [&](const char* name, auto* function) {
    m.def(name, function, "q"_a.none(), "input_row_offsets"_a.none(), "kv_blocks"_a.none(), "cache_lengths"_a.none(),
          "kv_lookup_table"_a.none(), "layer_idx"_a, "token_indices"_a.none(), "counts"_a.none(), "out"_a.none(),
          "lse"_a.none(), "page_stride"_a, "scale"_a.none(), "max_prompt_length"_a.none(), "max_cache_length"_a.none(),
          "group"_a.none(), "warps"_a.none(), "unroll"_a.none(), "stream"_a.none(), "check_values"_a);
  };
  define_qsa("qsa_sparse_attention", &qsa_sparse_attention<Given::kTensors>);
  define_qsa("check_qsa_sparse_attention", &qsa_sparse_attention<Given::kDescriptions>);
  m.def("qsa_sparse_paged_attention", &qsa_sparse_paged_attention, "q"_a.none(), "k_cache"_a.none(), "v_cache"_a.none(),
        "logical_indices"_a.none(), "block_table"_a.none(), "token_to_req"_a.none(), "query_start_loc"_a.none(),
        "seq_lens"_a.none(), "out"_a.none(), "scale"_a.none(), "stream"_a.none());
  m.def("xla_handlers", &ra::xla_handlers);
  m.def("supports", &supports, "op"_a, "cuda"_a, "device"_a, "dtype"_a, "head_dim"_a, "group"_a);
  m.def("current_stream", &ra::current_stream, "tensor"_a, "device"_a,
        "The current stream of the tensor's framework, or None if the framework has no C exchange API.");
  m.def("may_be_pending", &ra::may_be_pending, "tensors"_a,
        "False where no value can be a torch tensor that requires grad or is lazily negated.");
  m.def("build_info", &build_info);
  m.def("cuda_devices", &cuda_devices);
  m.def("num_threads", &ra::num_threads);
  m.def("set_num_threads", &ra::set_num_threads, "n"_a);
}
