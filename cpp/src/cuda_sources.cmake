# Target ragged_attention_cuda. One file an instantiation, so that they compile side by side; the tables that say which
# exist and why stand in each operation's cuda/config.h.
set(RAGGED_ATTENTION_HEAD_DIMS "" CACHE STRING
    "Head dims (buckets of cuda/config.h, such as 128) whose portable kernels are compiled, for the edit loop; empty: all")

set(ragged_tensor_core_head_dims 64 96 128 192 256)
set(ragged_fp32_head_dims 64 128 256)
set(qsa_tensor_core_head_dims 64 128 256)
set(bf16_element cutlass::bfloat16_t)
set(fp16_element cutlass::half_t)

set(instantiations src/qsa_sparse_attention/cuda/instantiations/fp32.cu)
set(RAGGED_ATTENTION_MISSING "")
# Compiles the file, or leaves `definition` to stand in for it: a launch that refuses.
macro(ragged_attention_instantiation head_dim file definition)
  if(RAGGED_ATTENTION_HEAD_DIMS STREQUAL "" OR "${head_dim}" IN_LIST RAGGED_ATTENTION_HEAD_DIMS)
    list(APPEND instantiations ${file})
  else()
    string(APPEND RAGGED_ATTENTION_MISSING "${definition}\n")
  endif()
endmacro()

foreach(head_dim IN LISTS ragged_fp32_head_dims)
  ragged_attention_instantiation(${head_dim} src/ragged_flash_attention/cuda/instantiations/fp32_${head_dim}.cu
                                 "RAGGED_FP32(${head_dim})")
endforeach()
foreach(dtype bf16 fp16)
  foreach(head_dim IN LISTS ragged_tensor_core_head_dims)
    ragged_attention_instantiation(${head_dim} src/ragged_flash_attention/cuda/instantiations/${dtype}_${head_dim}.cu
                                   "RAGGED(${${dtype}_element}, ${head_dim})")
  endforeach()
  foreach(head_dim IN LISTS qsa_tensor_core_head_dims)
    ragged_attention_instantiation(${head_dim} src/qsa_sparse_attention/cuda/instantiations/${dtype}_${head_dim}.cu
                                   "QSA(${${dtype}_element}, ${head_dim})")
  endforeach()
endforeach()
if(RAGGED_ATTENTION_MISSING)
  message(WARNING "ragged_attention: only the portable kernels of head dims ${RAGGED_ATTENTION_HEAD_DIMS} are built "
                  "(RAGGED_ATTENTION_HEAD_DIMS); calls that need others are refused")
  configure_file(src/common/cuda/missing.cpp.in ${CMAKE_CURRENT_BINARY_DIR}/missing.cpp @ONLY)
  list(APPEND instantiations ${CMAKE_CURRENT_BINARY_DIR}/missing.cpp)
endif()

add_library(ragged_attention_cuda STATIC
  src/common/cuda/runtime.cpp
  src/common/cuda/first_bad.cu
  src/ragged_flash_attention/cuda/dispatch.cpp
  src/qsa_sparse_attention/cuda/dispatch.cpp
  ${instantiations})
target_include_directories(ragged_attention_cuda PUBLIC include src)
target_link_libraries(ragged_attention_cuda PUBLIC CUDA::cudart_static PRIVATE ragged_attention_cutlass
                      ragged_attention_warnings)
# Nothing here uses what sm_80 does not have, so nvcc's front end and optimiser, which take nearly all the time, run once
# for compute_80, and only the assembler runs for each GPU.
set(portable_targets "")
foreach(architecture IN LISTS RAGGED_ATTENTION_CUDA_ARCHITECTURES)
  if(NOT architecture MATCHES "^([0-9]+)[af]?-real$")
    message(FATAL_ERROR "RAGGED_ATTENTION_CUDA_ARCHITECTURES: expected a list like 80-real;90a-real (machine code for each, "
                        "from 80 on), got '${architecture}' in '${RAGGED_ATTENTION_CUDA_ARCHITECTURES}'")
  endif()
  list(APPEND portable_targets sm_${CMAKE_MATCH_1})
endforeach()
list(JOIN portable_targets "," portable_targets)
target_compile_options(ragged_attention_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_80,code=[${portable_targets}]>)
set_target_properties(ragged_attention_cuda PROPERTIES
  CUDA_ARCHITECTURES OFF
  # With relocatable device code, ptxas ignores setmaxnreg and serialises wgmma.
  CUDA_SEPARABLE_COMPILATION OFF
  CUDA_RUNTIME_LIBRARY Static)
target_compile_options(ragged_attention_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)

# Hopper's own kernels, for sm_90a alone; they compile in seconds, and all are built (ragged_flash_attention/sm90/config.h).
if("90a-real" IN_LIST RAGGED_ATTENTION_CUDA_ARCHITECTURES)
  set(sm90_instantiations "")
  foreach(dtype bf16 fp16)
    foreach(head_dim 64 80 96 128 192 256)
      list(APPEND sm90_instantiations src/ragged_flash_attention/sm90/instantiations/${dtype}_${head_dim}.cu)
    endforeach()
  endforeach()
  foreach(dtype bf16 fp16)
    foreach(head_dim 64 128 256)
      list(APPEND sm90_instantiations src/qsa_sparse_attention/sm90/instantiations/${dtype}_${head_dim}.cu)
    endforeach()
  endforeach()
  add_library(ragged_attention_sm90 STATIC
    src/common/cuda/sm90/tensor_map.cpp
    src/common/cuda/sm90/tickets.cu
    src/ragged_flash_attention/sm90/dispatch.cpp
    src/qsa_sparse_attention/sm90/dispatch.cpp
    ${sm90_instantiations})
  target_include_directories(ragged_attention_sm90 PUBLIC include src)
  target_link_libraries(ragged_attention_sm90 PUBLIC CUDA::cudart_static PRIVATE ragged_attention_cutlass
                        ragged_attention_warnings)
  set_target_properties(ragged_attention_sm90 PROPERTIES
    CUDA_ARCHITECTURES OFF CUDA_SEPARABLE_COMPILATION OFF CUDA_RUNTIME_LIBRARY Static)
  target_compile_options(ragged_attention_sm90 PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr>)
  target_link_libraries(ragged_attention_cuda PUBLIC ragged_attention_sm90)
else()
  target_sources(ragged_attention_cuda PRIVATE src/common/sm90_absent.cpp)
endif()
