# Target ragged_attention_cutlass: the CUTLASS/CuTe headers. README.md beside this says which version and why.
set(RAGGED_ATTENTION_CUTLASS_MINIMUM 4.2.0)
set(RAGGED_ATTENTION_CUTLASS_BELOW 5.0.0)

set(cutlass_include "")
set(cutlass_from "")

# 1. A checkout or an unpacked archive the caller names.
if(NOT CUTLASS_DIR AND DEFINED ENV{CUTLASS_DIR})
  set(CUTLASS_DIR "$ENV{CUTLASS_DIR}")
endif()
if(CUTLASS_DIR)
  if(NOT EXISTS "${CUTLASS_DIR}/include/cutlass/version.h")
    message(FATAL_ERROR "CUTLASS_DIR is ${CUTLASS_DIR}, but ${CUTLASS_DIR}/include/cutlass/version.h does not exist.")
  endif()
  set(cutlass_include "${CUTLASS_DIR}/include")
  set(cutlass_from "CUTLASS_DIR")
endif()

# 2. An installed CUTLASS with its CMake package.
if(NOT cutlass_include)
  find_package(NvidiaCutlass QUIET)
  if(NvidiaCutlass_FOUND)
    get_target_property(cutlass_include nvidia::cutlass::cutlass INTERFACE_INCLUDE_DIRECTORIES)
    list(GET cutlass_include 0 cutlass_include)
    set(cutlass_from "find_package(NvidiaCutlass)")
  endif()
endif()

# 3. The PyPI wheel nvidia-cutlass, found without importing it (importing pulls in SciPy).
if(NOT cutlass_include)
  find_package(Python 3.10 COMPONENTS Interpreter QUIET)
  if(Python_Interpreter_FOUND)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import importlib.util as u; s = u.find_spec('cutlass_library'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE cutlass_wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(cutlass_wheel AND EXISTS "${cutlass_wheel}/source/include/cutlass/version.h")
      set(cutlass_include "${cutlass_wheel}/source/include")
      set(cutlass_from "the nvidia-cutlass wheel")
    endif()
  endif()
endif()

# 4. A download, only when asked for.
if(NOT cutlass_include AND RAGGED_ATTENTION_FETCH_CUTLASS)
  include(FetchContent)
  FetchContent_Declare(cutlass_source
    URL https://github.com/NVIDIA/cutlass/archive/refs/tags/v4.2.0.tar.gz
    SOURCE_SUBDIR none)  # headers only: do not configure its build
  FetchContent_MakeAvailable(cutlass_source)
  set(cutlass_include "${cutlass_source_SOURCE_DIR}/include")
  set(cutlass_from "a download (RAGGED_ATTENTION_FETCH_CUTLASS)")
endif()

if(NOT cutlass_include)
  message(FATAL_ERROR
    "ragged_attention: the CUDA kernels need the CUTLASS headers (${RAGGED_ATTENTION_CUTLASS_MINIMUM} or newer) and none "
    "were found. Any one of these helps:\n"
    "  * pip install --no-deps nvidia-cutlass==4.2.0.0     (then build with --no-build-isolation)\n"
    "  * set CUTLASS_DIR to a checkout of NVIDIA/cutlass\n"
    "  * install CUTLASS so that find_package(NvidiaCutlass) works\n"
    "  * -DRAGGED_ATTENTION_FETCH_CUTLASS=ON to download it\n"
    "  * -DRAGGED_ATTENTION_CUDA=OFF to build for the CPU alone")
endif()

file(READ "${cutlass_include}/cutlass/version.h" version_header)
foreach(part MAJOR MINOR PATCH)
  string(REGEX MATCH "#define CUTLASS_${part} ([0-9]+)" _ "${version_header}")
  set(cutlass_${part} "${CMAKE_MATCH_1}")
endforeach()
set(RAGGED_ATTENTION_CUTLASS_VERSION "${cutlass_MAJOR}.${cutlass_MINOR}.${cutlass_PATCH}")
if(RAGGED_ATTENTION_CUTLASS_VERSION VERSION_LESS RAGGED_ATTENTION_CUTLASS_MINIMUM OR
   NOT RAGGED_ATTENTION_CUTLASS_VERSION VERSION_LESS RAGGED_ATTENTION_CUTLASS_BELOW)
  message(FATAL_ERROR "ragged_attention needs CUTLASS >= ${RAGGED_ATTENTION_CUTLASS_MINIMUM} and "
                      "< ${RAGGED_ATTENTION_CUTLASS_BELOW}; ${cutlass_from} has ${RAGGED_ATTENTION_CUTLASS_VERSION} "
                      "in ${cutlass_include}.")
endif()
message(STATUS "ragged_attention: CUTLASS ${RAGGED_ATTENTION_CUTLASS_VERSION} from ${cutlass_from} (${cutlass_include})")

add_library(ragged_attention_cutlass INTERFACE)
target_include_directories(ragged_attention_cutlass SYSTEM INTERFACE "${cutlass_include}")
# CUDA 13 moved libcu++ under include/cccl. nvcc looks there by itself; host compilers do not.
foreach(directory IN LISTS CUDAToolkit_INCLUDE_DIRS)
  if(EXISTS "${directory}/cccl")
    target_include_directories(ragged_attention_cutlass SYSTEM INTERFACE "${directory}/cccl")
  endif()
endforeach()
# Without it, CuTe's wgmma selector splits N = 24, 48, 176 into small instructions.
target_compile_definitions(ragged_attention_cutlass INTERFACE CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED)
