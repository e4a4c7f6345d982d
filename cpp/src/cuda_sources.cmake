# Target ragged_attention_cuda. One file an instantiation, so that they compile side by side; the tables that say which
# exist and why stand in each operation's cuda/config.h.
add_library(ragged_attention_cuda STATIC
  src/common/cuda/runtime.cpp
  src/common/cuda/first_bad.cu)
target_include_directories(ragged_attention_cuda PUBLIC include src)
target_link_libraries(ragged_attention_cuda PUBLIC CUDA::cudart_static PRIVATE ragged_attention_cutlass)
set_target_properties(ragged_attention_cuda PROPERTIES
  CUDA_ARCHITECTURES "${RAGGED_ATTENTION_CUDA_ARCHITECTURES}"
  # With relocatable device code, ptxas ignores setmaxnreg and serialises wgmma.
  CUDA_SEPARABLE_COMPILATION OFF
  CUDA_RUNTIME_LIBRARY Static)
target_compile_options(ragged_attention_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xptxas=-v --compress-mode=size>)
