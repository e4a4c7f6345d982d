# Target ragged_attention_cuda. One file an instantiation, so that they compile side by side; the tables that say which
# exist and why stand in each operation's cuda/config.h.
set(ragged_tensor_core_head_dims 64 96 128 192 256)
set(ragged_fp32_head_dims 64 128 256)
set(qsa_tensor_core_head_dims 64 128 256)

set(instantiations src/qsa_sparse_attention/cuda/instantiations/fp32.cu)
foreach(head_dim IN LISTS ragged_fp32_head_dims)
  list(APPEND instantiations src/ragged_flash_attention/cuda/instantiations/fp32_${head_dim}.cu)
endforeach()
foreach(dtype bf16 fp16)
  foreach(head_dim IN LISTS ragged_tensor_core_head_dims)
    list(APPEND instantiations src/ragged_flash_attention/cuda/instantiations/${dtype}_${head_dim}.cu)
  endforeach()
  foreach(head_dim IN LISTS qsa_tensor_core_head_dims)
    list(APPEND instantiations src/qsa_sparse_attention/cuda/instantiations/${dtype}_${head_dim}.cu)
  endforeach()
endforeach()

add_library(ragged_attention_cuda STATIC
  src/common/cuda/runtime.cpp
  src/common/cuda/first_bad.cu
  src/ragged_flash_attention/cuda/dispatch.cpp
  src/qsa_sparse_attention/cuda/dispatch.cpp
  ${instantiations})
target_include_directories(ragged_attention_cuda PUBLIC include src)
target_link_libraries(ragged_attention_cuda PUBLIC CUDA::cudart_static PRIVATE ragged_attention_cutlass
                      ragged_attention_warnings)
set_target_properties(ragged_attention_cuda PROPERTIES
  CUDA_ARCHITECTURES "${RAGGED_ATTENTION_CUDA_ARCHITECTURES}"
  # With relocatable device code, ptxas ignores setmaxnreg and serialises wgmma.
  CUDA_SEPARABLE_COMPILATION OFF
  CUDA_RUNTIME_LIBRARY Static)
target_compile_options(ragged_attention_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
