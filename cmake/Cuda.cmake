# Decides RAGGED_ATTENTION_HAS_CUDA, enables the language and finds CUTLASS.
include(CheckLanguage)

string(TOUPPER "${RAGGED_ATTENTION_CUDA}" cuda_option)
set(RAGGED_ATTENTION_HAS_CUDA OFF)
if(NOT cuda_option STREQUAL "OFF")
  # CUDACXX, then the PATH, then CUDA_HOME and CUDA_PATH, and nowhere else: CMake's own search would also look into
  # folders that are not on the PATH, and the Python build backend decides by the same list whether to bring CUTLASS.
  if(NOT CMAKE_CUDA_COMPILER AND DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER "$ENV{CUDACXX}")
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    find_program(RAGGED_ATTENTION_NVCC nvcc PATHS ENV PATH ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin NO_DEFAULT_PATH)
    if(RAGGED_ATTENTION_NVCC)
      # Through a link, nvcc would look for its parts beside the link.
      file(REAL_PATH "${RAGGED_ATTENTION_NVCC}" CMAKE_CUDA_COMPILER)
    endif()
  endif()
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES ${RAGGED_ATTENTION_CUDA_ARCHITECTURES})
    check_language(CUDA)
  endif()
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    if(CUDAToolkit_VERSION VERSION_LESS 12.8)
      message(FATAL_ERROR "ragged_attention needs CUDA 12.8 or newer, found ${CUDAToolkit_VERSION} "
                          "(${CMAKE_CUDA_COMPILER}). Point CUDACXX at a newer nvcc, or build for the CPU alone with "
                          "-DRAGGED_ATTENTION_CUDA=OFF.")
    endif()
    set(RAGGED_ATTENTION_HAS_CUDA ON)
  elseif(cuda_option STREQUAL "ON")
    message(FATAL_ERROR "RAGGED_ATTENTION_CUDA=ON, but no CUDA compiler was found. Put nvcc on the PATH, set CUDACXX or "
                        "CUDA_HOME, or build for the CPU alone with -DRAGGED_ATTENTION_CUDA=OFF.")
  endif()
endif()

if(RAGGED_ATTENTION_HAS_CUDA)
  include(third_party/cutlass.cmake)
  message(STATUS "ragged_attention: CUDA kernels ON (CUDA ${CUDAToolkit_VERSION}, architectures "
                 "${RAGGED_ATTENTION_CUDA_ARCHITECTURES})")
else()
  message(STATUS "ragged_attention: CUDA kernels OFF, CPU backend only (RAGGED_ATTENTION_CUDA=${RAGGED_ATTENTION_CUDA})")
endif()
