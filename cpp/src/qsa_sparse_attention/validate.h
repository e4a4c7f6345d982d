#pragma once

#include "qsa_sparse_attention/params.h"
#include "ragged_attention/qsa_sparse_attention.h"

namespace ragged_attention {

// Everything the host can see, on either device; throws before any work.
QsaParams validate(const QsaSparseAttentionArguments& arguments);
QsaParams validate(const QsaSparsePagedAttentionArguments& arguments);

}  // namespace ragged_attention
