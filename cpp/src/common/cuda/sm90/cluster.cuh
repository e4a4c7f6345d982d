// Signals between the CTAs of a cluster: that something in shared memory is there, or has been read. They take barriers
// in shared memory instead of the cluster's own, for which all threads of all roles would have to meet.
#pragma once

#include <cstdint>

#include "common/cuda/sm90/wgmma.cuh"

namespace ragged_attention::sm90 {

// Arrives at the `barrier` of each of the cluster's kCtas CTAs, which expects as many arrivals. By threads of a CTA
// that have met since they wrote, or read, what the signal is about.
template <int kCtas>
__device__ __forceinline__ void tell_cluster(std::uint64_t* barrier, int thread) {
  if (thread < kCtas) {
    asm volatile(
        "{\n"
        ".reg .b32 its;\n"
        "mapa.shared::cluster.u32 its, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [its];\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(thread)
        : "memory");
  }
}

// Waits for all CTAs' signal.
__device__ __forceinline__ void hear_from_cluster(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

}  // namespace ragged_attention::sm90
