#include <cuda_runtime.h>

#include <atomic>

#include "common/cuda/runtime.h"
#include "common/cuda/sm90/tickets.h"

namespace ragged_attention::sm90 {

namespace {

// A stream holds about a thousand launches that have not started: this is a hundred streams full of them. (What must
// not be is that as many launches are issued to a device while one on it is running.)
constexpr unsigned kCounters = 1 << 17;
// In the module, not allocated: an allocation would be refused while any stream is captured.
__device__ TicketCounter counters[kCounters];

}  // namespace

TicketCounter* next_ticket_counter(int device, void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "asking the stream for its capture");
  if (status != cudaStreamCaptureStatusNone) return nullptr;
  constexpr int kDevices = 64;
  static std::atomic<TicketCounter*> first[kDevices] = {};
  TicketCounter* base = device < kDevices ? first[device].load(std::memory_order_relaxed) : nullptr;
  if (base == nullptr) {
    void* address = nullptr;
    check_cuda(cudaGetSymbolAddress(&address, counters), "finding the ticket counters");
    base = static_cast<TicketCounter*>(address);
    if (device < kDevices) first[device].store(base, std::memory_order_relaxed);
  }
  // Each device counts for itself: the calls of a fast one would come round while a slow one is at work.
  static std::atomic<unsigned> next[kDevices] = {};
  return base + next[device % kDevices].fetch_add(1, std::memory_order_relaxed) % kCounters;
}

}  // namespace ragged_attention::sm90
