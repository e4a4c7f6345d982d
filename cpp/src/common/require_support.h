// The library's own use of supports().
#pragma once

#include "ragged_attention/support.h"

namespace ragged_attention {

// The path, or NotImplementedError with the reason.
Path require_support(const SupportQuery& query);

}  // namespace ragged_attention
