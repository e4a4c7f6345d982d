#include "common/checks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "ragged_attention/error.h"

namespace ragged_attention {

namespace {

using Wide = __int128;  // shapes times strides may pass 64 bits on hostile input

struct ByteRange {
  Wide begin = 0;
  Wide end = 0;
};

ByteRange byte_range(const TensorView& tensor) {
  const Wide base = reinterpret_cast<std::uintptr_t>(tensor.data);
  Wide low = 0, high = 0;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 0) return {base, base};
    const Wide reach = Wide{tensor.shape[i] - 1} * tensor.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  const Wide bytes = tensor.dtype.bytes();
  return {base + low * bytes, base + (high + 1) * bytes};
}

std::string strides_string(const TensorView& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(tensor.strides[i]);
  return text + "]";
}

}  // namespace

void check_rank(Named tensor, int rank, const char* layout) {
  if (tensor->rank == rank) return;
  throw ValueError(std::string(tensor.name) + ": expected " + std::to_string(rank) + " dimensions " + layout +
                   ", got " + std::to_string(tensor->rank) +
                   (tensor->rank <= TensorView::kMaxRank ? " with shape " + shape_string(*tensor) : std::string()));
}

void check_dtype(Named tensor, std::initializer_list<DType> accepted, const char* hint) {
  std::string list;
  for (const DType& dtype : accepted) {
    if (tensor->dtype == dtype) return;
    list += (list.empty() ? "" : &dtype == accepted.end() - 1 ? " or " : ", ") + to_string(dtype);
  }
  throw TypeError(std::string(tensor.name) + ": expected dtype " + list + ", got " + to_string(tensor->dtype) +
                  (hint != nullptr ? std::string("; ") + hint : std::string()));
}

void check_same_dtype(Named tensor, Named as) {
  if (tensor->dtype == as->dtype) return;
  throw TypeError(std::string(tensor.name) + ": expected " + as.name + "'s dtype " + to_string(as->dtype) + ", got " +
                  to_string(tensor->dtype));
}

void check_same_device(Named tensor, Named as) {
  if (tensor->device == as->device) return;
  throw ValueError(std::string(tensor.name) + ": expected a tensor on " + as.name + "'s device " +
                   to_string(as->device) + ", got one on " + to_string(tensor->device));
}

void check_dimension(Named tensor, int dimension, std::int64_t expected, const char* layout, const char* because) {
  if (tensor->shape[dimension] == expected) return;
  throw ValueError(std::string(tensor.name) + ": expected shape " + layout + " with " + std::to_string(expected) +
                   " in dimension " + std::to_string(dimension) + " (" + because + "), got shape " +
                   shape_string(*tensor));
}

void check_innermost_contiguous(Named tensor) {
  const int last = tensor->rank - 1;
  if (tensor->num_elements() == 0) return;  // frameworks give those any strides
  if (tensor->shape[last] <= 1 || tensor->strides[last] == 1) return;
  throw ValueError(std::string(tensor.name) + ": expected a contiguous last dimension (stride 1), got strides " +
                   strides_string(*tensor) + " for shape " + shape_string(*tensor));
}

void check_aligned(Named tensor) {
  const auto address = reinterpret_cast<std::uintptr_t>(tensor->data);
  const std::int64_t bytes = tensor->dtype.bytes();
  if (bytes == 0 || address % static_cast<std::uintptr_t>(bytes) == 0) return;
  throw ValueError(std::string(tensor.name) + ": expected data aligned to its element size of " +
                   std::to_string(bytes) + " bytes, got an address " +
                   std::to_string(address % static_cast<std::uintptr_t>(bytes)) + " bytes past one");
}

void check_output(Named output) {
  if (output->read_only) {
    throw ValueError(std::string(output.name) + ": expected a writable tensor, got a read-only one");
  }
  check_aligned(output);
  // Outermost first by stride: each step must clear everything the smaller steps reach. (A few non-overlapping layouts
  // fail this too; no framework makes them.)
  std::vector<std::pair<Wide, Wide>> dimensions;  // |stride|, reach
  for (int i = 0; i < output->rank; ++i) {
    if (output->shape[i] == 0) return;
    if (output->shape[i] == 1) continue;
    const Wide stride = output->strides[i] < 0 ? -Wide{output->strides[i]} : Wide{output->strides[i]};
    dimensions.emplace_back(stride, stride * (output->shape[i] - 1));
  }
  std::sort(dimensions.begin(), dimensions.end());
  Wide reach = 0;
  for (const auto& [stride, extent] : dimensions) {
    if (stride <= reach) {
      throw ValueError(std::string(output.name) + ": expected a tensor whose elements do not overlap, got strides " +
                       strides_string(*output) + " for shape " + shape_string(*output));
    }
    reach += extent;
  }
}

void check_no_overlap(Named output, std::initializer_list<Named> inputs) {
  const ByteRange a = byte_range(*output);
  if (a.begin == a.end) return;
  for (const Named& input : inputs) {
    if (input->device != output->device) continue;
    const ByteRange b = byte_range(*input);
    if (b.begin != b.end && a.begin < b.end && b.begin < a.end) {
      throw ValueError(std::string(output.name) + ": expected memory of its own, got a tensor that overlaps " +
                       input.name);
    }
  }
}

void check_results(Named out, const std::optional<TensorView>& lse_tensor, Named q, const char* rows,
                   std::initializer_list<Named> inputs) {
  const std::string out_layout = std::string("[") + rows + ", num_q_heads, head_dim]";
  check_rank(out, 3, out_layout.c_str());
  check_same_device(out, q);
  for (int i = 0; i < 3; ++i) check_dimension(out, i, q->shape[i], out_layout.c_str(), "q's shape");
  check_innermost_contiguous(out);
  check_output(out);
  check_no_overlap(out, inputs);
  if (!lse_tensor) return;
  const Named lse{"lse", &*lse_tensor};
  const std::string lse_layout = std::string("[") + rows + ", num_q_heads]";
  check_rank(lse, 2, lse_layout.c_str());
  check_dtype(lse, {kFloat32});
  check_same_device(lse, q);
  for (int i = 0; i < 2; ++i) check_dimension(lse, i, q->shape[i], lse_layout.c_str(), "q's shape");
  check_output(lse);
  check_no_overlap(lse, inputs);
  check_no_overlap(lse, {out});
}

void check_heads(Named q, std::int64_t num_q_heads, Named kv, std::int64_t num_kv_heads) {
  if (num_q_heads == 0) return;
  if (num_kv_heads == 0) {
    throw ValueError(std::string(kv.name) + ": expected at least one kv head under " + q.name + "'s " +
                     std::to_string(num_q_heads) + " query heads, got shape " + shape_string(*kv));
  }
  if (num_q_heads % num_kv_heads != 0) {
    throw ValueError(std::string(kv.name) + ": expected a number of kv heads that divides " + q.name + "'s " +
                     std::to_string(num_q_heads) + " query heads, got " + std::to_string(num_kv_heads));
  }
}

float checked_scale(std::optional<double> scale, std::int64_t head_dim) {
  const double value = scale ? *scale : 1.0 / std::sqrt(static_cast<double>(head_dim));
  if (!std::isfinite(value) || std::fabs(value) > static_cast<double>(std::numeric_limits<float>::max())) {
    throw ValueError("scale: expected a finite float32 value, got " + std::to_string(value));
  }
  return static_cast<float>(value);
}

std::int32_t checked_int32(std::int64_t value, const char* what) {
  if (value <= std::numeric_limits<std::int32_t>::max()) return static_cast<std::int32_t>(value);
  throw NotImplementedError(std::string(what) + ": expected at most 2147483647, got " + std::to_string(value));
}

std::int64_t stride_of(const TensorView& tensor, int dimension) {
  return tensor.shape[dimension] <= 1 ? 0 : tensor.strides[dimension];
}

namespace {

IntegerType integer_type(DType dtype) {
  return dtype == kInt64 ? IntegerType::kI64 : dtype == kUInt32 ? IntegerType::kU32 : IntegerType::kI32;
}

}  // namespace

IntegerArray integer_array(const TensorView& vector) {
  return {vector.data, vector.strides[0], integer_type(vector.dtype)};
}

IntegerMatrix integer_matrix(const TensorView& matrix) {
  return {{matrix.data, matrix.strides[1], integer_type(matrix.dtype)}, matrix.strides[0]};
}

}  // namespace ragged_attention
