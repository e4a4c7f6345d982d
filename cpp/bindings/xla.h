// The operations as XLA calls them: handlers for jax.ffi.
#pragma once

#include <nanobind/nanobind.h>

namespace ragged_attention {

// [(target name, platform, capsule of the handler)], as jax.ffi.register_ffi_target takes them.
//
// Buffers come in the order of the public function, then as results out and, if there is a second, lse. Host parameters
// are attributes of the same names: 64-bit integers, a float64 `scale`, a string; one that is None is left out.
nanobind::list xla_handlers();

}  // namespace ragged_attention
