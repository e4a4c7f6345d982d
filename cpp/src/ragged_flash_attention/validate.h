#pragma once

#include "ragged_attention/ragged_flash_attention.h"
#include "ragged_flash_attention/params.h"

namespace ragged_attention {

// Everything the host can see, on either device; throws before any work.
RaggedParams validate(const RaggedFlashAttentionArguments& arguments);

}  // namespace ragged_attention
