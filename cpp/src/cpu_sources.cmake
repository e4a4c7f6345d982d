# The CPU backend: a static library of its own, compiled with -O3 whatever the target that links it uses.
#
# The kernels are compiled once per instruction set from the same source; cpu_features.cpp chooses at run time. Only those
# files get instruction-set flags: an inline function that both sides compile would be kept in one copy, and that one
# might not run on the machine (see common/cpu/vec.h).

find_package(Threads REQUIRED)

set(RAGGED_ATTENTION_CPU_KERNEL_DIRS
    ${CMAKE_CURRENT_LIST_DIR}/ragged_flash_attention/cpu
    ${CMAKE_CURRENT_LIST_DIR}/qsa_sparse_attention/cpu)

add_library(ragged_attention_cpu STATIC
  ${CMAKE_CURRENT_LIST_DIR}/common/thread_pool.cpp
  ${CMAKE_CURRENT_LIST_DIR}/common/cpu_features.cpp
  ${CMAKE_CURRENT_LIST_DIR}/ragged_flash_attention/cpu/ragged_flash_attention_cpu.cpp
  ${CMAKE_CURRENT_LIST_DIR}/qsa_sparse_attention/cpu/qsa_sparse_attention_cpu.cpp)

function(ragged_attention_add_cpu_kernels level)
  foreach(dir IN LISTS RAGGED_ATTENTION_CPU_KERNEL_DIRS)
    target_sources(ragged_attention_cpu PRIVATE ${dir}/kernel_${level}.cpp)
    set_source_files_properties(${dir}/kernel_${level}.cpp PROPERTIES
      COMPILE_OPTIONS "${ARGN}"
      OBJECT_DEPENDS "${dir}/kernel.inl")
  endforeach()
endfunction()

ragged_attention_add_cpu_kernels(baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
  ragged_attention_add_cpu_kernels(avx2 -mavx2 -mfma -mf16c)
  # GCC 12 warns of its own AVX-512 headers.
  ragged_attention_add_cpu_kernels(avx512 $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized> -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  target_compile_definitions(ragged_attention_cpu PRIVATE RAGGED_ATTENTION_CPU_X86)
endif()

target_include_directories(ragged_attention_cpu PUBLIC
  ${CMAKE_CURRENT_LIST_DIR}/../include
  ${CMAKE_CURRENT_LIST_DIR})
target_compile_features(ragged_attention_cpu PUBLIC cxx_std_17)
# No -ffast-math: NaN and infinity have a meaning here. -O3 also where the build type says -O2; a debug build stays -O0.
target_compile_options(ragged_attention_cpu PRIVATE
  $<$<NOT:$<CONFIG:Debug>>:-O3> -Wall -Wextra)
set_target_properties(ragged_attention_cpu PROPERTIES
  POSITION_INDEPENDENT_CODE ON
  CXX_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON)
target_link_libraries(ragged_attention_cpu PUBLIC Threads::Threads)
