// What the library throws. Each type becomes the Python exception of the same name.
#pragma once

#include <stdexcept>
#include <string>

namespace ragged_attention {

// A value or a shape that the contract does not accept.
struct ValueError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A dtype that the contract does not accept, or an object that is no tensor.
struct TypeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A legal request that nothing on this device can run; says why and the way out.
struct NotImplementedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An error of the CUDA driver or runtime itself.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace ragged_attention
