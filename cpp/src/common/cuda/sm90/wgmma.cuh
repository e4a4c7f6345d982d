// Warpgroup matrix products on plain register arrays: D[64, kN] += A[64, 16] B[16, kN], a k-step at a time.
//
// Shared-memory operands lie in blocks of 64 columns (128 bytes a row, 128-byte swizzle), rows of a block adjacent:
// what one TMA box of 64 columns writes. A descriptor names a block; steps along K or M add to its address field.
//
// Accumulator of thread t, warp w = t / 32 % 4, lane l: element 4 j + 2 r + e is row 16 w + l / 4 + 8 r, column
// 8 j + 2 (l % 4) + e. Packed in pairs, elements 4 j .. 4 j + 7 are the A operand of the k-step of columns 8 j .. 8 j
// + 15.
#pragma once

// Without it CUTLASS 4.2 knows few values of N: 80 and 112 are not among them.
#ifndef CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#endif

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include <cstddef>
#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>
#include <type_traits>
#include <utility>

#include "common/cuda/sm90/swizzle.h"

namespace ragged_attention::sm90 {

namespace detail {

template <typename Element, int kN>
struct WgmmaOps;

// CuTe names its products by their shape: bring them under one template.
#define RAGGED_ATTENTION_WGMMA(n)                                                                            \
  template <>                                                                                                \
  struct WgmmaOps<cutlass::bfloat16_t, n> {                                                                  \
    template <cute::SM90::GMMA::Major kMajorA, cute::SM90::GMMA::Major kMajorB>                              \
    using Shared = cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<kMajorA, kMajorB>;                       \
    template <cute::SM90::GMMA::Major kMajorB>                                                               \
    using Registers = cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K, kMajorB>; \
  };                                                                                                         \
  template <>                                                                                                \
  struct WgmmaOps<cutlass::half_t, n> {                                                                      \
    template <cute::SM90::GMMA::Major kMajorA, cute::SM90::GMMA::Major kMajorB>                              \
    using Shared = cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<kMajorA, kMajorB>;                         \
    template <cute::SM90::GMMA::Major kMajorB>                                                               \
    using Registers = cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_RS<cute::SM90::GMMA::Major::K, kMajorB>;   \
  }
RAGGED_ATTENTION_WGMMA(16);
RAGGED_ATTENTION_WGMMA(32);
RAGGED_ATTENTION_WGMMA(64);
RAGGED_ATTENTION_WGMMA(80);
RAGGED_ATTENTION_WGMMA(96);
RAGGED_ATTENTION_WGMMA(112);
RAGGED_ATTENTION_WGMMA(128);
RAGGED_ATTENTION_WGMMA(192);
RAGGED_ATTENTION_WGMMA(256);
#undef RAGGED_ATTENTION_WGMMA

template <typename Op, int kSize, std::size_t... I>
__device__ __forceinline__ void fma_shared(float (&d)[kSize], std::uint64_t a, std::uint64_t b,
                                           cute::SM90::GMMA::ScaleOut scale_d, std::index_sequence<I...>) {
  Op::fma(a, b, d[I]..., scale_d);
}

template <typename Op, int kSize, std::size_t... I>
__device__ __forceinline__ void fma_registers(float (&d)[kSize], const std::uint32_t* a, std::uint64_t b,
                                              cute::SM90::GMMA::ScaleOut scale_d, std::index_sequence<I...>) {
  Op::fma(a[0], a[1], a[2], a[3], b, d[I]..., scale_d);
}

}  // namespace detail

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Bytes as a descriptor's address field counts them.
constexpr std::uint64_t descriptor_step(std::uint64_t bytes) { return bytes >> 4; }

// An operand whose rows run along M or N and whose 128-byte rows run along K (Q, K). 8 rows are one swizzle atom of
// 1024 bytes; K steps of 16 elements are 32 bytes apart within the atom.
__device__ __forceinline__ std::uint64_t descriptor_k_major(std::uint32_t address) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kAtomStride = descriptor_step(8 * kBlockRowBytes) << 32;
  constexpr std::uint64_t kUnused = std::uint64_t{1} << 16;
  return kSwizzle128 | kAtomStride | kUnused | ((address & 0x3ffff) >> 4);
}

// An operand whose rows run along K and whose 128-byte rows run along M or N (V): `block_bytes` from one block of 64
// columns to the next; a K step of 16 rows is 2048 bytes.
__device__ __forceinline__ std::uint64_t descriptor_across_k(std::uint32_t address, std::uint32_t block_bytes) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kAtomStride = descriptor_step(8 * kBlockRowBytes) << 32;
  return kSwizzle128 | kAtomStride | (descriptor_step(block_bytes) << 16) | ((address & 0x3ffff) >> 4);
}

// kMajorA: whether the 128-byte rows of A run along K or along M; those of B run along K.
template <typename Element, int kN, cute::SM90::GMMA::Major kMajorA = cute::SM90::GMMA::Major::K>
__device__ __forceinline__ void wgmma_shared(float (&d)[kN / 2], std::uint64_t a, std::uint64_t b, bool accumulate) {
  using Op = typename detail::WgmmaOps<Element, kN>::template Shared<kMajorA, cute::SM90::GMMA::Major::K>;
  detail::fma_shared<Op>(d, a, b, accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero,
                         std::make_index_sequence<kN / 2>{});
}

template <typename Element, int kN>
__device__ __forceinline__ void wgmma_registers(float (&d)[kN / 2], const std::uint32_t* a, std::uint64_t b,
                                                bool accumulate) {
  using Op = typename detail::WgmmaOps<Element, kN>::template Registers<cute::SM90::GMMA::Major::MN>;
  detail::fma_registers<Op>(d, a, b, accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero,
                            std::make_index_sequence<kN / 2>{});
}

// Registers that a product in flight reads or writes may not be touched until it has been waited for, which the
// compiler cannot see: pin them at both ends.
template <typename T, int kSize>
__device__ __forceinline__ void pin(T (&registers)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

__device__ __forceinline__ void wgmma_fence() { cute::warpgroup_arrive(); }
__device__ __forceinline__ void wgmma_commit() { cute::warpgroup_commit_batch(); }
// Until at most kPending committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  cute::warpgroup_wait<kPending>();
}

}  // namespace ragged_attention::sm90
