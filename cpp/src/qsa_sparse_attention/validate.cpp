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

// What does not depend on the layout of the cache.
QsaParams rows_and_results(const TensorView& q, const TensorView& out, const std::optional<TensorView>& lse,
                           std::optional<double> scale) {
  QsaParams params;
  params.scale = checked_scale(scale, q.shape[2]);
  params.q = q.data;
  params.q_row_stride = stride_of(q, 0);
  params.q_head_stride = stride_of(q, 1);
  params.out = out.data;
  params.out_row_stride = stride_of(out, 0);
  params.out_head_stride = stride_of(out, 1);
  if (lse) {
    params.lse = static_cast<float*>(lse->data);
    params.lse_row_stride = stride_of(*lse, 0);
    params.lse_head_stride = stride_of(*lse, 1);
  }
  params.dtype = q.dtype;
  params.out_dtype = out.dtype;
  params.num_q_heads = checked_int32(q.shape[1], "q's number of heads");
  params.head_dim = checked_int32(q.shape[2], "q's head_dim");
  return params;
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

  QsaParams params = rows_and_results(arguments.q, arguments.out, arguments.lse, arguments.scale);
  params.longest_hint = arguments.max_prompt_length.value_or(-1);
  params.rows = {integer_array(*offsets), batch, q->shape[0]};
  params.cache_lengths = integer_array(*lengths);
  params.cache = paged_cache(arguments);
  params.token_indices = static_cast<const std::int32_t*>(indices->data);
  params.token_indices_row_stride = stride_of(*indices, 0);
  params.counts = static_cast<const std::int32_t*>(counts->data);
  params.counts_stride = stride_of(*counts, 0);
  params.selection_width = checked_int32(indices->shape[1], "token_indices' selection_width");
  params.num_kv_heads = checked_int32(cache->shape[kHead], "kv_blocks' number of heads");
  return params;
}

QsaParams validate(const QsaSparsePagedAttentionArguments& arguments) {
  const Named q{"q", &arguments.q}, out{"out", &arguments.out};
  const Named k{"k_cache", &arguments.k_cache}, v{"v_cache", &arguments.v_cache};
  const Named indices{"logical_indices", &arguments.logical_indices}, table{"block_table", &arguments.block_table};
  static constexpr char kLayout[] = "[num_pages, page_size, num_kv_heads, head_dim]";
  static constexpr char kIndices[] = "[total_q, selection_width + 1]";

  check_rank(q, 3, kQLayout);
  check_dtype(q, {kFloat32, kFloat16, kBFloat16});
  for (const Named& cache : {k, v}) {
    check_rank(cache, 4, kLayout);
    check_same_dtype(cache, q);
    check_dimension(cache, 3, q->shape[2], kLayout, "q's head_dim");
  }
  for (int i = 0; i < 4; ++i) check_dimension(v, i, k->shape[i], kLayout, "k_cache's shape");
  if (q->shape[2] == 0) throw ValueError("q: expected a head_dim of at least 8, got shape " + shape_string(*q));
  if (k->shape[1] == 0) throw ValueError("k_cache: expected a page_size of at least 1, got " + shape_string(*k));
  check_heads(q, q->shape[1], k, k->shape[2]);
  check_rank(indices, 2, kIndices);
  check_dtype(indices, {kInt32});
  check_dimension(indices, 0, q->shape[0], kIndices, "q's rows");
  if (indices->shape[1] == 0) {
    throw ValueError("logical_indices: expected a last column with the counts, got shape " + shape_string(*indices));
  }
  check_rank(table, 2, "[batch, max_pages]");
  check_dtype(table, {kUInt32, kInt32, kInt64});
  const std::int64_t batch = table->shape[0];
  for (const Named& operand : {k, v, indices, table}) check_same_device(operand, q);
  for (const Named& operand : {q, k, v, indices}) check_innermost_contiguous(operand);
  for (const Named& operand : {q, k, v, indices, table}) check_aligned(operand);
  for (int i = 0; i < 3; ++i) {
    if (stride_of(*k, i) == stride_of(*v, i)) continue;
    throw NotImplementedError("v_cache: expected k_cache's strides, got " + std::to_string(v->strides[i]) +
                              " instead of " + std::to_string(k->strides[i]) + " in dimension " + std::to_string(i));
  }
  check_dtype(out, {kFloat32, kFloat16, kBFloat16});
  check_results(out, std::nullopt, q, "total_q", {q, k, v, indices, table});

  QsaParams params = rows_and_results(arguments.q, arguments.out, std::nullopt, arguments.scale);
  params.rows.batch = batch;
  params.rows.total = q->shape[0];
  if (arguments.query_start_loc) {
    const Named offsets{"query_start_loc", &*arguments.query_start_loc};
    check_rank(offsets, 1, "[batch + 1]");
    check_dtype(offsets, {kUInt32, kInt32, kInt64});
    check_dimension(offsets, 0, batch + 1, "[batch + 1]", "block_table has batch rows");
    if (!arguments.seq_lens) throw ValueError("seq_lens: expected a tensor with query_start_loc, got None");
    const Named lengths{"seq_lens", &*arguments.seq_lens};
    check_rank(lengths, 1, "[batch]");
    check_dtype(lengths, {kUInt32, kInt32, kInt64});
    check_dimension(lengths, 0, batch, "[batch]", "block_table has batch rows");
    for (const Named& operand : {offsets, lengths}) {
      check_same_device(operand, q);
      check_aligned(operand);
    }
    check_no_overlap(out, {offsets, lengths});
    params.rows.offsets = integer_array(*offsets);
    params.cache_lengths = integer_array(*lengths);
  } else {
    if (!arguments.token_to_req) throw ValueError("token_to_req: expected a tensor without query_start_loc, got None");
    const Named sequences{"token_to_req", &*arguments.token_to_req};
    check_rank(sequences, 1, "[total_q]");
    check_dtype(sequences, {kInt32});
    check_dimension(sequences, 0, q->shape[0], "[total_q]", "q's rows");
    check_same_device(sequences, q);
    check_innermost_contiguous(sequences);
    check_aligned(sequences);
    check_no_overlap(out, {sequences});
    params.row_to_sequence = static_cast<const std::int32_t*>(sequences->data);
  }
  PagedCache& cache = params.cache;
  cache.k = k->data;
  cache.v = v->data;
  cache.page_stride = stride_of(*k, 0);
  cache.token_stride = stride_of(*k, 1);
  cache.head_stride = stride_of(*k, 2);
  cache.num_pages = k->shape[0];
  cache.page_size = k->shape[1];
  cache.max_pages = table->shape[1];
  cache.lookup_table = integer_matrix(*table);
  params.selection_width = checked_int32(indices->shape[1] - 1, "logical_indices' selection_width");
  params.token_indices = static_cast<const std::int32_t*>(indices->data);
  params.token_indices_row_stride = stride_of(*indices, 0);
  params.counts = params.token_indices + params.selection_width;
  params.counts_stride = params.token_indices_row_stride;
  params.num_kv_heads = checked_int32(k->shape[2], "k_cache's number of heads");
  return params;
}

}  // namespace ragged_attention
