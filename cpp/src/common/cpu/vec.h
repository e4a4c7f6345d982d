// Vectors of floats for the CPU kernels, on top of the compiler's vector extensions (GCC and Clang).
//
// This file is compiled several times with different instruction-set flags. The linker keeps one copy of an inline
// function whatever flags it was compiled with, so everything here has internal linkage (an anonymous namespace), and
// the files that include it use no inline function or template of any other header, the standard library's included.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/cpu/element.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define RAGGED_ATTENTION_INLINE inline __attribute__((always_inline))

namespace ragged_attention {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef int32_t VecInt __attribute__((vector_size(4 * kWidth)));

constexpr float kInfinity = __builtin_inff();

RAGGED_ATTENTION_INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

RAGGED_ATTENTION_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof(v)); }

RAGGED_ATTENTION_INLINE Vec splat(float x) {
#if defined(__AVX512F__)
  return (Vec)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (Vec)_mm256_set1_ps(x);
#else
  return Vec{x, x, x, x};
#endif
}

RAGGED_ATTENTION_INLINE VecInt splat_int(int32_t x) { return VecInt{} + x; }

// a * b + c, fused where the instruction set has it.
RAGGED_ATTENTION_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// a > b ? a : b in every lane. A NaN in either gives b: so max_or_second(x, limit) drops a NaN x, and
// max_or_second(limit, x) keeps it.
RAGGED_ATTENTION_INLINE Vec max_or_second(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (Vec)_mm_max_ps((__m128)a, (__m128)b);
#else
  const VecInt greater = a > b;
  return (Vec)((greater & (VecInt)a) | (~greater & (VecInt)b));
#endif
}

RAGGED_ATTENTION_INLINE float reduce_max(Vec v) {
  float result = v[0];
  for (int i = 1; i < kWidth; ++i) result = v[i] > result ? v[i] : result;
  return result;
}

// Pairwise, in an order that depends on nothing.
RAGGED_ATTENTION_INLINE float reduce_add(Vec v) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                                    _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1)));
#else
  const __m256 half = (__m256)v;
#endif
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// 2^x for x <= 0 (and a little beyond), within 1.5 ulp. Exactly 0 below 2^-125 and at -inf; NaN stays NaN.
RAGGED_ATTENTION_INLINE Vec exp2_nonpositive(Vec x) {
  constexpr float kLowest = -125.0f;
  // Adding this rounds to an integer n and leaves n + 127, the exponent field of 2^n, in the low mantissa bits.
  constexpr float kShift = 12582912.0f + 127.0f;
  const Vec clamped = max_or_second(splat(kLowest), x);
  const Vec shifted = clamped + splat(kShift);
  const Vec f = clamped - (shifted - splat(kShift));
  // 2^f on [-0.5, 0.5]: minimax in the relative error, which is under 1e-7.
  Vec p = splat(0x1.5bba14p-10f);
  p = multiply_add(p, f, splat(0x1.3cea88p-7f));
  p = multiply_add(p, f, splat(0x1.c6b752p-5f));
  p = multiply_add(p, f, splat(0x1.ebf9bcp-3f));
  p = multiply_add(p, f, splat(0x1.62e42ap-1f));
  p = multiply_add(p, f, splat(1.0f));
  // A product and not an addition of exponents: it keeps every NaN a NaN.
  const Vec power = (Vec)((VecInt)shifted << 23);
  const VecInt tiny = x < splat(kLowest);
  return (Vec)(~tiny & (VecInt)(p * power));
}

RAGGED_ATTENTION_INLINE float exp2_nonpositive(float x) { return exp2_nonpositive(splat(x))[0]; }

// --- Element types ---------------------------------------------------------------------------------------------------

struct Float32 {
  typedef float Type;
};
struct Float16 {
  typedef uint16_t Type;
};
struct BFloat16 {
  typedef uint16_t Type;
};

RAGGED_ATTENTION_INLINE float float_from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

RAGGED_ATTENTION_INLINE uint32_t bits_of_float(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

RAGGED_ATTENTION_INLINE float to_float(Float32, float x) { return x; }
RAGGED_ATTENTION_INLINE float to_float(BFloat16, uint16_t x) { return float_from_bits(uint32_t{x} << 16); }

RAGGED_ATTENTION_INLINE float to_float(Float16, uint16_t x) {
  const uint32_t sign = (x & 0x8000u) << 16;
  const uint32_t magnitude = x & 0x7fffu;
  // Rebias the exponent; a subnormal becomes exact through the subtraction of the implicit bit it does not have.
  const uint32_t normal = (magnitude << 13) + (magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u);
  const float subnormal = float_from_bits((magnitude << 13) + 0x38800000u) - float_from_bits(0x38800000u);
  return float_from_bits(sign | (magnitude < 0x0400u ? bits_of_float(subnormal) : normal));
}

RAGGED_ATTENTION_INLINE float from_float(Float32, float x) { return x; }

// Round to nearest even; a NaN stays a NaN (its quiet bit is set, lest its payload be cut to an infinity).
RAGGED_ATTENTION_INLINE uint16_t from_float(BFloat16, float x) {
  const uint32_t bits = bits_of_float(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

RAGGED_ATTENTION_INLINE uint16_t from_float(Float16, float x) {
  const uint32_t bits = bits_of_float(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520, half way to 2^16: rounds to infinity
    result = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: let the addition to 0.5 round to a multiple of 2^-24
    result = bits_of_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | result);
}

// kWidth elements as floats.
RAGGED_ATTENTION_INLINE Vec load_as_float(Float32, const float* p) { return load(p); }

RAGGED_ATTENTION_INLINE Vec load_as_float(BFloat16, const uint16_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(__SSE2__)
  return (Vec)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)p));
#else
  return Vec{to_float(BFloat16(), p[0]), to_float(BFloat16(), p[1]), to_float(BFloat16(), p[2]),
             to_float(BFloat16(), p[3])};
#endif
}

RAGGED_ATTENTION_INLINE Vec load_as_float(Float16, const uint16_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  return Vec{to_float(Float16(), p[0]), to_float(Float16(), p[1]), to_float(Float16(), p[2]),
             to_float(Float16(), p[3])};
#endif
}

// The last n < kWidth elements of a row, the lanes after them 0. Reads nothing past the row's end.
template <typename Element>
RAGGED_ATTENTION_INLINE Vec load_as_float_partial(Element, const typename Element::Type* p, int n) {
  typename Element::Type row[kWidth] = {};
  __builtin_memcpy(row, p, sizeof(row[0]) * static_cast<size_t>(n));
  return load_as_float(Element(), row);
}

// n elements as floats, then zeros up to `padded`, a multiple of kWidth.
template <typename Element>
RAGGED_ATTENTION_INLINE void load_row(Element, const typename Element::Type* p, int n, float* row, int padded) {
  int d = 0;
  for (; d + kWidth <= n; d += kWidth) store(row + d, load_as_float(Element(), p + d));
  if (d < n) {
    store(row + d, load_as_float_partial(Element(), p + d, n - d));
    d += kWidth;
  }
  for (; d < padded; d += kWidth) store(row + d, Vec{});
}

// Asks for a row's cache lines. Rows to be packed lie whole pages apart when all heads of a token come first: no
// hardware prefetcher follows them, and each costs a page walk that out-of-order execution does not reach far enough to
// hide.
template <typename Element>
RAGGED_ATTENTION_INLINE void prefetch_row(Element, const typename Element::Type* row, int n) {
  constexpr int kLine = 64 / static_cast<int>(sizeof(typename Element::Type));
  for (int d = 0; d < n; d += kLine) __builtin_prefetch(row + d);
}

// row * factor rounded to the element type, into memory of any alignment.
template <typename Element>
RAGGED_ATTENTION_INLINE void store_row(Element, typename Element::Type* p, int n, const float* row, float factor) {
  for (int d = 0; d < n; ++d) {
    const typename Element::Type x = from_float(Element(), row[d] * factor);
    p[d] = x;
  }
}

RAGGED_ATTENTION_INLINE void store_row(CpuElement element, void* p, int n, const float* row, float factor) {
  switch (element) {
    case CpuElement::kFloat32:
      return store_row(Float32(), static_cast<float*>(p), n, row, factor);
    case CpuElement::kFloat16:
      return store_row(Float16(), static_cast<uint16_t*>(p), n, row, factor);
    case CpuElement::kBFloat16:
      return store_row(BFloat16(), static_cast<uint16_t*>(p), n, row, factor);
  }
}

// --- Online softmax --------------------------------------------------------------------------------------------------

// Running state of one row, in base 2: weights are 2^(score - max). `max` is -inf until a score above it is seen.
struct SoftmaxState {
  float max;
  float sum;
};

// Replaces the scores s[begin, end) (begin < end) by their weights, updates the state, and returns the factor by which
// what was accumulated before must be multiplied. Scores are in base 2 already (times log2 e). Rounds the interval
// outwards to whole vectors: the floats of s around it are overwritten.
//
// -inf scores weigh exactly 0, also while nothing else was seen (the maximum then counts as 0, never -inf - -inf). A
// NaN score is left out of the maximum and comes out of the exponential, so it reaches the sum whatever the others are.
RAGGED_ATTENTION_INLINE float softmax_update(float* s, int begin, int end, SoftmaxState& state) {
  const int first = begin & ~(kWidth - 1);
  const int last = (end + kWidth - 1) & ~(kWidth - 1);
  for (int j = first; j < begin; ++j) s[j] = -kInfinity;
  for (int j = end; j < last; ++j) s[j] = -kInfinity;

  Vec max0 = splat(state.max), max1 = max0;
  int j = first;
  for (; j + 2 * kWidth <= last; j += 2 * kWidth) {
    max0 = max_or_second(load(s + j), max0);
    max1 = max_or_second(load(s + j + kWidth), max1);
  }
  if (j < last) max0 = max_or_second(load(s + j), max0);
  const float max = reduce_max(max_or_second(max0, max1));
  const float reference = max == -kInfinity ? 0.0f : max;

  const Vec shift = splat(reference);
  Vec sum0 = Vec{}, sum1 = Vec{};
  j = first;
  for (; j + 2 * kWidth <= last; j += 2 * kWidth) {
    const Vec w0 = exp2_nonpositive(load(s + j) - shift);
    const Vec w1 = exp2_nonpositive(load(s + j + kWidth) - shift);
    store(s + j, w0);
    store(s + j + kWidth, w1);
    sum0 += w0;
    sum1 += w1;
  }
  if (j < last) {
    const Vec w0 = exp2_nonpositive(load(s + j) - shift);
    store(s + j, w0);
    sum0 += w0;
  }
  const float factor = exp2_nonpositive(state.max - reference);
  state.sum = state.sum * factor + reduce_add(sum0 + sum1);
  state.max = max;
  return factor;
}

// What the accumulated row must be multiplied by. A row that saw nothing, or only -inf, has the sum 0 and gets 0.
RAGGED_ATTENTION_INLINE bool softmax_empty(const SoftmaxState& state) { return state.sum == 0.0f; }

// Natural logarithm of the sum of the exponentials of the scores.
RAGGED_ATTENTION_INLINE float softmax_lse(const SoftmaxState& state) {
  if (softmax_empty(state)) return -kInfinity;
  return static_cast<float>(0.693147180559945309 * static_cast<double>(state.max) +
                            __builtin_log(static_cast<double>(state.sum)));
}

}  // namespace
}  // namespace ragged_attention
