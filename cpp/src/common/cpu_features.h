// Which of the instruction sets that the CPU kernels are compiled for is in use.
#pragma once

#include <cstdint>

namespace ragged_attention {

// In ascending order. The baseline is what the compiler targets without flags: SSE2 on x86-64, NEON on aarch64.
enum class CpuIsa : std::int32_t { kBaseline, kAvx2, kAvx512 };

// The highest level that this processor and its operating system support, or a lower one that the environment variable
// RAGGED_ATTENTION_CPU_ISA asks for (read once, at first use): "baseline", or a name that cpu_isa_name gives. A level
// that the machine lacks, or a name of another architecture's, is a ValueError.
CpuIsa cpu_isa();

// Overrides it, for tests. ValueError if this machine does not support the level.
void set_cpu_isa(CpuIsa isa);

bool cpu_isa_supported(CpuIsa isa);

// "sse2", "neon" or "generic" for the baseline; "avx2"; "avx512".
const char* cpu_isa_name(CpuIsa isa);
inline const char* cpu_isa_name() { return cpu_isa_name(cpu_isa()); }

}  // namespace ragged_attention
