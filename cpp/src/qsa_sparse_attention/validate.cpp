#include "qsa_sparse_attention/validate.h"

#include <algorithm>

#include "common/checks.h"
#include "ragged_attention/error.h"

namespace ragged_attention {

namespace {

constexpr char kQLayout[] = "[total_q, num_q_heads, head_dim]";
constexpr char kCacheLayout[] = "[num_pages, 2, num_layers, page_size, num_kv_heads, head_dim]";
enum CacheDimension { kPage, kKv, kLayer, kToken, kHead, kChannel };

void check_packed_pages(Named cache, std::int64_t page_stride) {
  std::int64_t expected = 1;
  for (int i = kChannel; i >= kKv; --i) {
    if (cache->shape[i] > 1 && cache->strides[i] != expected) {
      throw ValueError(std::string("kv_blocks: expected packed pages (dimensions 1 to 5 contiguous) with an explicit "
                                   "page_stride, got stride ") +
                       std::to_string(cache->strides[i]) + " instead of " + std::to_string(expected) +
                       " in dimension " + std::to_string(i));
    }
    expected *= cache->shape[i];
  }
  if (page_stride < expected) {
    throw ValueError("page_stride: expected -1 (kv_blocks' own strides) or at least one packed page of " +
                     std::to_string(expected) + " elements, got " + std::to_string(page_stride));
  }
  // Offsets are 64-bit, in bytes too.
  constexpr std::int64_t kMostElements = std::int64_t{1} << 60;
  const std::int64_t most = kMostElements / std::max<std::int64_t>(cache->shape[kPage], 1);
  if (page_stride > most) {
    throw ValueError("page_stride: expected at most " + std::to_string(most) + " elements for " +
                     std::to_string(cache->shape[kPage]) + " pages, got " + std::to_string(page_stride));
  }
}

PagedCache paged_cache(const QsaSparseAttentionArguments& arguments) {
  const TensorView& tensor = arguments.kv_blocks;
  const bool own_strides = arguments.page_stride == -1;
  PagedCache cache;
  std::int64_t kv_stride = stride_of(tensor, kKv);
  std::int64_t layer_stride = stride_of(tensor, kLayer);
  cache.page_stride = stride_of(tensor, kPage);
  cache.token_stride = stride_of(tensor, kToken);
  cache.head_stride = stride_of(tensor, kHead);
  if (!own_strides) {
    cache.page_stride = arguments.page_stride;
    cache.head_stride = tensor.shape[kChannel];
    cache.token_stride = cache.head_stride * tensor.shape[kHead];
    layer_stride = cache.token_stride * tensor.shape[kToken];
    kv_stride = layer_stride * tensor.shape[kLayer];
  }
  cache.num_pages = tensor.shape[kPage];
  cache.page_size = tensor.shape[kToken];
  cache.max_pages = arguments.kv_lookup_table.shape[1];
  cache.lookup_table = integer_matrix(arguments.kv_lookup_table);
  if (tensor.data != nullptr) {
    const auto layer = arguments.layer_idx * layer_stride * tensor.dtype.bytes();
    cache.k = static_cast<const char*>(tensor.data) + layer;
    cache.v = static_cast<const char*>(cache.k) + kv_stride * tensor.dtype.bytes();
  }
  return cache;
}

}  // namespace

QsaParams validate(const QsaSparseAttentionArguments& arguments) {
  const Named q{"q", &arguments.q}, cache{"kv_blocks", &arguments.kv_blocks}, out{"out", &arguments.out};
  const Named offsets{"input_row_offsets", &arguments.input_row_offsets};
  const Named lengths{"cache_lengths", &arguments.cache_lengths};
  const Named table{"kv_lookup_table", &arguments.kv_lookup_table};
  const Named indices{"token_indices", &arguments.token_indices}, counts{"counts", &arguments.counts};
  static constexpr char kInt64Hint[] = "convert it first: int64, as top-k gives, is not read silently";

  check_rank(q, 3, kQLayout);
  check_dtype(q, {kFloat32, kFloat16, kBFloat16});
  check_rank(cache, 6, kCacheLayout);
  check_same_dtype(cache, q);
  check_rank(offsets, 1, "[batch + 1]");
  check_rank(lengths, 1, "[batch]");
  check_rank(table, 2, "[batch, max_pages]");
  for (const Named& integers : {offsets, lengths, table}) check_dtype(integers, {kUInt32, kInt32, kInt64});
  check_rank(indices, 2, "[total_q, selection_width]");
  check_rank(counts, 1, "[total_q]");
  for (const Named& integers : {indices, counts}) {
    check_dtype(integers, {kInt32}, integers->dtype == kInt64 ? kInt64Hint : nullptr);
  }
  for (const Named& operand : {cache, offsets, lengths, table, indices, counts}) check_same_device(operand, q);

  if (offsets->shape[0] == 0) {
    throw ValueError("input_row_offsets: expected [batch + 1] with at least one entry, got shape [0]");
  }
  const std::int64_t batch = offsets->shape[0] - 1;
  check_dimension(lengths, 0, batch, "[batch]", "input_row_offsets has batch + 1 entries");
  check_dimension(table, 0, batch, "[batch, max_pages]", "input_row_offsets has batch + 1 entries");
  check_dimension(indices, 0, q->shape[0], "[total_q, selection_width]", "q's rows");
  check_dimension(counts, 0, q->shape[0], "[total_q]", "q's rows");
  check_dimension(cache, kKv, 2, kCacheLayout, "K and V");
  if (q->shape[2] == 0) throw ValueError("q: expected a head_dim of at least 8, got shape " + shape_string(*q));
  check_dimension(cache, kChannel, q->shape[2], kCacheLayout, "q's head_dim");
  for (const int dimension : {int{kLayer}, int{kToken}}) {
    if (cache->shape[dimension] == 0) {
      throw ValueError(std::string("kv_blocks: expected ") + kCacheLayout +
                       " with num_layers and page_size at least 1, " + "got shape " + shape_string(*cache));
    }
  }
  check_heads(q, q->shape[1], cache, cache->shape[kHead]);
  if (arguments.layer_idx < 0 || arguments.layer_idx >= cache->shape[kLayer]) {
    throw ValueError("layer_idx: expected a layer in [0, " + std::to_string(cache->shape[kLayer]) + "), got " +
                     std::to_string(arguments.layer_idx));
  }
  for (const Named& operand : {q, cache, indices}) check_innermost_contiguous(operand);
  for (const Named& operand : {q, cache, offsets, lengths, table, indices, counts}) check_aligned(operand);
  if (arguments.page_stride != -1) check_packed_pages(cache, arguments.page_stride);
  if (arguments.group && cache->shape[kHead] > 0 && *arguments.group != q->shape[1] / cache->shape[kHead]) {
    throw ValueError("group: expected num_q_heads / num_kv_heads = " +
                     std::to_string(q->shape[1] / cache->shape[kHead]) + ", got " + std::to_string(*arguments.group));
  }

  check_dtype(out, {kFloat32, kFloat16, kBFloat16});
  check_results(out, arguments.lse, q, "total_q", {q, cache, offsets, lengths, table, indices, counts});

  QsaParams params;
  params.scale = checked_scale(arguments.scale, q->shape[2]);
  params.longest_hint = arguments.max_prompt_length.value_or(-1);
  params.q = q->data;
  params.q_row_stride = stride_of(*q, 0);
  params.q_head_stride = stride_of(*q, 1);
  params.out = out->data;
  params.out_row_stride = stride_of(*out, 0);
  params.out_head_stride = stride_of(*out, 1);
  if (arguments.lse) {
    params.lse = static_cast<float*>(arguments.lse->data);
    params.lse_row_stride = stride_of(*arguments.lse, 0);
    params.lse_head_stride = stride_of(*arguments.lse, 1);
  }
  params.rows = {integer_array(*offsets), batch, q->shape[0]};
  params.cache_lengths = integer_array(*lengths);
  params.cache = paged_cache(arguments);
  params.token_indices = static_cast<const std::int32_t*>(indices->data);
  params.token_indices_row_stride = stride_of(*indices, 0);
  params.counts = static_cast<const std::int32_t*>(counts->data);
  params.counts_stride = stride_of(*counts, 0);
  params.selection_width = checked_int32(indices->shape[1], "token_indices' selection_width");
  params.dtype = q->dtype;
  params.out_dtype = out->dtype;
  params.num_q_heads = checked_int32(q->shape[1], "q's number of heads");
  params.num_kv_heads = checked_int32(cache->shape[kHead], "kv_blocks' number of heads");
  params.head_dim = checked_int32(q->shape[2], "q's head_dim");
  return params;
}

}  // namespace ragged_attention
