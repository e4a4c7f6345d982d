// Marks a function that runs on the host and on the device; nothing but `inline` where no CUDA compiler is at work.
#pragma once

#if defined(__CUDACC__)
#define RAGGED_ATTENTION_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define RAGGED_ATTENTION_HOST_DEVICE inline
#endif
