#include "common/check_values.h"
#include "common/cuda_host.h"
#include "common/require_support.h"
#include "qsa_sparse_attention/validate.h"
#include "ragged_attention/error.h"

namespace ragged_attention {

namespace {

Path path_of(const QsaParams& params, Device device) {
  return require_support({Operation::kQsaSparseAttention, device, params.dtype, params.head_dim,
                          params.num_q_heads > 0 ? params.group() : 1});
}

void check_selection(const QsaParams& params, Device device, void* stream) {
  const SelectionCheck check{params};
  Evidence evidence;
  const std::int64_t i = device.type == DeviceType::kCuda ? cuda_first_bad(check, device.index, stream, &evidence)
                                                          : first_bad(check, &evidence);
  if (i < 0) return;
  const SelectionCheck::Place place = check.place(i);
  const std::string row = std::to_string(place.row), value = std::to_string(evidence.value);
  switch (place.kind) {
    case SelectionCheck::Kind::kCount:
      throw ValueError("counts: expected values in [0, " + std::to_string(params.selection_width) + "], got " + value +
                       " in row " + row);
    case SelectionCheck::Kind::kCacheLength:
      throw ValueError("cache_lengths: expected values of at least 0, got " + value + " for sequence " + row);
    case SelectionCheck::Kind::kEntry:
      break;
  }
  const std::string where = " in row " + row + ", column " + std::to_string(place.column);
  if (evidence.has_other) {
    throw ValueError("kv_lookup_table: expected page ids in [0, " + std::to_string(params.cache.num_pages) + "), got " +
                     std::to_string(evidence.other) + " for token " + value + where + " of token_indices");
  }
  throw ValueError("token_indices: expected positions in the row's own sequence and within its page table, got " +
                   value + where);
}

void run(const QsaParams& params, Path path, Device device, void* stream, std::optional<std::int64_t> warps,
         std::optional<std::int64_t> unroll) {
  if (!params.has_output()) return;
  if (path == Path::kCpu) return qsa_sparse_attention_cpu(params);
  const bool forced = warps || unroll;
  if (path == Path::kCudaSm90 && !forced && qsa_sparse_attention_sm90(params, device.index, stream)) return;
  qsa_sparse_attention_cuda(params, device.index, stream, warps, unroll);
}

}  // namespace

void check_qsa_sparse_attention(const QsaSparseAttentionArguments& arguments) {
  path_of(validate(arguments), arguments.q.device);
}

void qsa_sparse_attention(const QsaSparseAttentionArguments& arguments) {
  const QsaParams params = validate(arguments);
  const Device device = arguments.q.device;
  const Path path = path_of(params, device);
  if (path == Path::kCpu && (arguments.warps || arguments.unroll)) {
    throw ValueError(std::string(arguments.warps ? "warps" : "unroll") +
                     ": expected None with CPU tensors (it forces a CUDA kernel), got " +
                     std::to_string(arguments.warps ? *arguments.warps : *arguments.unroll));
  }
  if (arguments.check_values) {
    check_not_capturing(device, arguments.stream);
    check_offsets(params.rows, device, arguments.stream);
    check_selection(params, device, arguments.stream);
  }
  run(params, path, device, arguments.stream, arguments.warps, arguments.unroll);
}

void qsa_sparse_paged_attention(const QsaSparsePagedAttentionArguments& arguments) {
  const QsaParams params = validate(arguments);
  const Device device = arguments.q.device;
  run(params, path_of(params, device), device, arguments.stream, std::nullopt, std::nullopt);
}

}  // namespace ragged_attention
