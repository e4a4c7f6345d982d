#include "ragged_flash_attention/validate.h"

#include "common/checks.h"
#include "ragged_attention/error.h"

namespace ragged_attention {

namespace {

Mask checked_mask(const std::string& mask_str, std::int64_t window) {
  struct Row {
    const char* name;
    MaskKind kind;
    bool windowed;
  };
  static constexpr Row kMasks[] = {
      {"null", MaskKind::kNull, false},
      {"causal", MaskKind::kCausal, false},
      {"sliding_window_causal", MaskKind::kSlidingWindowCausal, true},
      {"sliding_window_noncausal", MaskKind::kSlidingWindowNoncausal, true},
      {"chunked", MaskKind::kChunked, true},
      {"chunked_causal", MaskKind::kChunkedCausal, true},
  };
  static const char* const kAccepted =
      "'null' or 'causal' with local_window_size=-1, 'sliding_window_causal', 'sliding_window_noncausal', 'chunked' or "
      "'chunked_causal' with local_window_size >= 1";
  for (const Row& row : kMasks) {
    if (mask_str != row.name) continue;
    if (row.windowed ? window < 1 : window != -1) {
      throw ValueError("local_window_size: expected " + std::string(row.windowed ? "at least 1" : "-1") +
                       " with mask_str='" + mask_str + "', got " + std::to_string(window) + "; accepted: " + kAccepted);
    }
    return {row.kind, window};
  }
  throw ValueError("mask_str: got '" + mask_str + "' with local_window_size=" + std::to_string(window) +
                   "; accepted: " + kAccepted);
}

RaggedTensor ragged_tensor(const TensorView& tensor) {
  return {tensor.data, stride_of(tensor, 0), stride_of(tensor, 1)};
}

}  // namespace

RaggedParams validate(const RaggedFlashAttentionArguments& arguments) {
  const Named q{"q", &arguments.q}, k{"k", &arguments.k}, v{"v", &arguments.v}, out{"out", &arguments.out};
  const Named offsets{"input_row_offsets", &arguments.input_row_offsets};
  static constexpr char kQLayout[] = "[total_seq_len, num_q_heads, head_dim]";
  static constexpr char kKvLayout[] = "[total_seq_len, num_kv_heads, head_dim]";

  check_rank(q, 3, kQLayout);
  check_dtype(q, {kFloat32, kFloat16, kBFloat16});
  for (const Named& kv : {k, v}) {
    check_rank(kv, 3, kKvLayout);
    check_same_dtype(kv, q);
    check_same_device(kv, q);
    check_dimension(kv, 0, q->shape[0], kKvLayout, "q's rows");
    check_dimension(kv, 2, q->shape[2], kKvLayout, "q's head_dim");
  }
  check_dimension(v, 1, k->shape[1], kKvLayout, "k's heads");
  check_rank(offsets, 1, "[batch + 1]");
  check_dtype(offsets, {kUInt32, kInt32, kInt64});
  check_same_device(offsets, q);
  if (offsets->shape[0] == 0) {
    throw ValueError("input_row_offsets: expected [batch + 1] with at least one entry, got shape [0]");
  }
  if (q->shape[2] == 0) throw ValueError("q: expected a head_dim of at least 8, got shape " + shape_string(*q));
  check_heads(q, q->shape[1], k, k->shape[1]);
  for (const Named& input : {q, k, v}) {
    check_innermost_contiguous(input);
    check_aligned(input);
  }
  check_aligned(offsets);

  check_same_dtype(out, q);
  check_results(out, arguments.lse, q, "total_seq_len", {q, k, v, offsets});

  RaggedParams params;
  params.mask = checked_mask(arguments.mask_str, arguments.local_window_size);
  params.longest_hint = arguments.q_max_seq_len.value_or(-1);
  params.scale = checked_scale(arguments.scale, q->shape[2]);
  params.q = ragged_tensor(*q);
  params.k = ragged_tensor(*k);
  params.v = ragged_tensor(*v);
  params.out = out->data;
  params.out_row_stride = stride_of(*out, 0);
  params.out_head_stride = stride_of(*out, 1);
  if (arguments.lse) {
    params.lse = static_cast<float*>(arguments.lse->data);
    params.lse_row_stride = stride_of(*arguments.lse, 0);
    params.lse_head_stride = stride_of(*arguments.lse, 1);
  }
  params.rows = {integer_array(*offsets), offsets->shape[0] - 1, q->shape[0]};
  params.dtype = q->dtype;
  params.num_q_heads = checked_int32(q->shape[1], "q's number of heads");
  params.num_kv_heads = checked_int32(k->shape[1], "k's number of heads");
  params.head_dim = checked_int32(q->shape[2], "q's head_dim");
  return params;
}

}  // namespace ragged_attention
