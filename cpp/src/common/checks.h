// Argument checks shared by both operations. A message names the argument, what was given and what is accepted.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "common/integer_array.h"
#include "ragged_attention/tensor_view.h"

namespace ragged_attention {

// A tensor and the name it has in the public signature.
struct Named {
  const char* name;
  const TensorView* tensor;

  const TensorView* operator->() const { return tensor; }
  const TensorView& operator*() const { return *tensor; }
};

void check_rank(Named tensor, int rank, const char* layout);
void check_dtype(Named tensor, std::initializer_list<DType> accepted, const char* hint = nullptr);
void check_same_dtype(Named tensor, Named as);
void check_same_device(Named tensor, Named as);
void check_dimension(Named tensor, int dimension, std::int64_t expected, const char* layout, const char* because);
void check_innermost_contiguous(Named tensor);
void check_aligned(Named tensor);  // to its own element size

// Writable, and no two elements at one address.
void check_output(Named output);
void check_no_overlap(Named output, std::initializer_list<Named> inputs);

// Shapes, device, layout and memory of the results against q, [rows, heads, head_dim]; `rows` is the name of its first
// dimension. The dtype of out is the operation's business.
void check_results(Named out, const std::optional<TensorView>& lse, Named q, const char* rows,
                   std::initializer_list<Named> inputs);

void check_heads(Named q, std::int64_t num_q_heads, Named kv, std::int64_t num_kv_heads);
float checked_scale(std::optional<double> scale, std::int64_t head_dim);
std::int32_t checked_int32(std::int64_t value, const char* what);

// A size-1 dimension's stride means nothing: 0 then, so that it can't spoil an alignment test.
std::int64_t stride_of(const TensorView& tensor, int dimension);

// Of a tensor whose dtype has passed check_dtype.
IntegerArray integer_array(const TensorView& vector);
IntegerMatrix integer_matrix(const TensorView& matrix);

}  // namespace ragged_attention
