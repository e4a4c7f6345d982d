#include "common/cpu_features.h"

#include <atomic>
#include <cstdlib>
#include <string>

#include "ragged_attention/error.h"

namespace ragged_attention {
namespace {

constexpr CpuIsa kLevels[] = {CpuIsa::kBaseline, CpuIsa::kAvx2, CpuIsa::kAvx512};

CpuIsa best_isa() {
  CpuIsa best = CpuIsa::kBaseline;
  for (const CpuIsa isa : kLevels) {
    if (cpu_isa_supported(isa)) best = isa;
  }
  return best;
}

CpuIsa initial_isa() {
  const char* text = std::getenv("RAGGED_ATTENTION_CPU_ISA");
  if (text == nullptr || *text == '\0') return best_isa();
  const std::string name = text;
  std::string accepted = "'baseline'";
  for (const CpuIsa isa : kLevels) {
    if (!cpu_isa_supported(isa)) continue;
    if (name == cpu_isa_name(isa) || (name == "baseline" && isa == CpuIsa::kBaseline)) return isa;
    accepted += std::string(", '") + cpu_isa_name(isa) + "'";
  }
  throw ValueError("the environment variable RAGGED_ATTENTION_CPU_ISA is '" + name + "'; this machine runs " +
                   accepted);
}

std::atomic<int> g_isa{-1};  // -1: not asked for yet

}  // namespace

bool cpu_isa_supported(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kBaseline:
      return true;
#if defined(RAGGED_ATTENTION_CPU_X86)
    // __builtin_cpu_supports asks the operating system too (XGETBV): a kernel that does not save the registers counts
    // as a processor without them.
    case CpuIsa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case CpuIsa::kAvx512:
      return cpu_isa_supported(CpuIsa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
#endif
    default:
      return false;
  }
}

CpuIsa cpu_isa() {
  int isa = g_isa.load(std::memory_order_relaxed);
  if (isa < 0) {
    const int initial = static_cast<int>(initial_isa());
    isa = g_isa.compare_exchange_strong(isa, initial) ? initial : isa;
  }
  return static_cast<CpuIsa>(isa);
}

void set_cpu_isa(CpuIsa isa) {
  if (!cpu_isa_supported(isa)) {
    throw ValueError(std::string("this machine does not run ") + cpu_isa_name(isa) + " code");
  }
  g_isa.store(static_cast<int>(isa));
}

const char* cpu_isa_name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
    default:
#if defined(RAGGED_ATTENTION_CPU_X86)
      return "sse2";
#elif defined(__aarch64__)
      return "neon";
#else
      return "generic";
#endif
  }
}

}  // namespace ragged_attention
