// The CPU kernels against plain double-precision attention, at every instruction-set level this machine runs.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/cpu_features.h"
#include "common/thread_pool.h"
#include "masks.h"
#include "qsa_sparse_attention/params.h"
#include "ragged_flash_attention/params.h"

namespace ragged_attention {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// --- Element types, written independently of the kernels' conversions
// -------------------------------------------------

// Rounds to a format of `digits` significant bits whose smallest normal exponent is `lowest`, ties to even.
double round_to(double x, int digits, int lowest, double largest) {
  if (!std::isfinite(x) || x == 0.0) return x;
  const int exponent = std::max(std::ilogb(x), lowest);
  const double ulp = std::ldexp(1.0, exponent - digits + 1);
  const double rounded = std::nearbyint(x / ulp) * ulp;
  return std::fabs(rounded) > largest ? std::copysign(static_cast<double>(kInf), x) : rounded;
}

double round_to(double x, DType dtype) {
  if (dtype == kFloat16) return round_to(x, 11, -14, 65504.0);
  if (dtype == kBFloat16) return round_to(x, 8, -126, 0x1.fep127);
  return static_cast<double>(static_cast<float>(x));
}

std::uint16_t encode_half(double rounded) {
  const std::uint16_t sign = std::signbit(rounded) ? 0x8000 : 0;
  const double magnitude = std::fabs(rounded);
  if (std::isnan(rounded)) return 0x7e00;
  if (std::isinf(magnitude)) return static_cast<std::uint16_t>(sign | 0x7c00);
  if (magnitude < 0x1p-14) return static_cast<std::uint16_t>(sign | static_cast<int>(magnitude * 0x1p24));
  const int exponent = std::ilogb(magnitude);
  const int mantissa = static_cast<int>(std::ldexp(magnitude, 10 - exponent)) - 1024;
  return static_cast<std::uint16_t>(sign | (exponent + 15) << 10 | mantissa);
}

double decode_half(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa != 0 ? static_cast<double>(kNan) : sign * static_cast<double>(kInf);
  return sign * (exponent == 0 ? mantissa * 0x1p-24 : std::ldexp(1024 + mantissa, exponent - 25));
}

// An array of one of the three types, in memory of exactly its size (so that AddressSanitizer sees every overrun) and,
// if wished, aligned to its elements only.
class Array {
 public:
  Array(DType dtype, std::int64_t size, bool misaligned = false) : dtype_(dtype), size_(size) {
    const std::size_t bytes = static_cast<std::size_t>(size * dtype.bytes());
    skip_ = misaligned ? static_cast<std::size_t>(dtype.bytes()) : 0;
    memory_.reset(new char[bytes + skip_]);
    for (std::int64_t i = 0; i < size; ++i) set(i, static_cast<double>(kNan));
  }

  void set(std::int64_t i, double value) {
    const double rounded = round_to(value, dtype_);
    if (dtype_ == kFloat16) {
      const std::uint16_t bits = encode_half(rounded);
      std::memcpy(at(i), &bits, 2);
    } else {
      const float x = static_cast<float>(rounded);
      std::uint32_t bits;
      std::memcpy(&bits, &x, 4);
      const std::uint16_t high = static_cast<std::uint16_t>(bits >> 16);
      if (dtype_ == kBFloat16)
        std::memcpy(at(i), &high, 2);
      else
        std::memcpy(at(i), &x, 4);
    }
  }

  double get(std::int64_t i) const {
    std::uint16_t half;
    std::memcpy(&half, at(i), 2);
    if (dtype_ == kFloat16) return decode_half(half);
    const std::uint32_t wide = static_cast<std::uint32_t>(half) << 16;
    float x;
    if (dtype_ == kBFloat16)
      std::memcpy(&x, &wide, 4);
    else
      std::memcpy(&x, at(i), 4);
    return static_cast<double>(x);
  }

  void randomize(std::mt19937& random) {
    std::normal_distribution<double> normal;
    for (std::int64_t i = 0; i < size_; ++i) set(i, normal(random));
  }

  char* at(std::int64_t i) const { return memory_.get() + skip_ + i * dtype_.bytes(); }
  std::int64_t size() const { return size_; }

 private:
  DType dtype_;
  std::int64_t size_;
  std::size_t skip_ = 0;
  std::unique_ptr<char[]> memory_;
};

// --- One row of attention in double precision
// -------------------------------------------------------------------------

struct RowResult {
  std::vector<double> out;
  double lse = -static_cast<double>(kInf);
};

// key(j, d) and value(j, d) for j in [0, n).
RowResult attend(const std::function<double(int)>& query, std::int64_t n,
                 const std::function<double(std::int64_t, int)>& key,
                 const std::function<double(std::int64_t, int)>& value, int head_dim, double scale) {
  RowResult result;
  result.out.assign(static_cast<std::size_t>(head_dim), 0.0);
  std::vector<double> scores(static_cast<std::size_t>(n));
  double max = -static_cast<double>(kInf);
  for (std::int64_t j = 0; j < n; ++j) {
    double dot = 0.0;
    for (int d = 0; d < head_dim; ++d) dot += query(d) * key(j, d);
    scores[static_cast<std::size_t>(j)] = dot * scale;
    if (dot * scale > max) max = dot * scale;
  }
  double sum = 0.0;
  for (double& score : scores) {
    score = std::exp(score - (std::isinf(max) && max < 0 ? 0.0 : max));
    sum += score;
  }
  if (sum == 0.0) return result;
  for (std::int64_t j = 0; j < n; ++j) {
    for (int d = 0; d < head_dim; ++d)
      result.out[static_cast<std::size_t>(d)] += scores[static_cast<std::size_t>(j)] * value(j, d) / sum;
  }
  result.lse = max + std::log(sum);
  return result;
}

// Collects errors; positions of NaN and infinity must agree first.
struct Comparison {
  double error2 = 0.0, norm2 = 0.0, max_error = 0.0, lse_error = 0.0;
  int misplaced = 0;

  static bool same_class(double a, double b) {
    return std::isnan(a) == std::isnan(b) && std::isinf(a) == std::isinf(b) && (!std::isinf(a) || a == b);
  }
  void out(double actual, double expected) {
    if (!same_class(actual, expected)) ++misplaced;
    if (!std::isfinite(expected) || !std::isfinite(actual)) return;
    error2 += (actual - expected) * (actual - expected);
    norm2 += expected * expected;
    max_error = std::max(max_error, std::fabs(actual - expected));
  }
  void lse(double actual, double expected) {
    if (!same_class(actual, expected)) ++misplaced;
    if (!std::isfinite(expected) || !std::isfinite(actual)) return;
    lse_error = std::max(lse_error, std::fabs(actual - expected) / std::max(1.0, std::fabs(expected)));
  }
  void check(DType out_dtype) const {
    CHECK(misplaced == 0);
    CHECK(lse_error < 1e-5);
    if (out_dtype == kFloat32) {
      CHECK(std::sqrt(error2) <= 3e-6 * std::sqrt(norm2));
    } else {
      CHECK(max_error < (out_dtype == kFloat16 ? 2e-3 : 1.6e-2));
    }
  }
};

void for_each_isa(const std::function<void()>& test) {
  const CpuIsa before = cpu_isa();
  for (const CpuIsa isa : {CpuIsa::kBaseline, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (!cpu_isa_supported(isa)) continue;
    set_cpu_isa(isa);
    CAPTURE(std::string(cpu_isa_name()));
    test();
  }
  set_cpu_isa(before);
}

// --- ragged_flash_attention
// -------------------------------------------------------------------------------------------

struct RaggedCase {
  DType dtype = kFloat32;
  int num_q_heads = 2, num_kv_heads = 1, head_dim = 64;
  std::vector<std::int64_t> offsets{0, 5};
  std::int64_t total = 5;
  Mask mask;
  float scale = 0.125f;
  bool padded = false;  // q, k, v lie in one buffer with NaN between their rows and heads
  bool misaligned = false;

  std::shared_ptr<Array> q, k, v, out;
  std::vector<float> lse;
  RaggedParams params;

  std::int64_t row_elements(int heads) const {
    return heads * std::int64_t{head_dim + (padded ? 8 : 0)} + (padded ? 16 : 0);
  }

  void allocate(unsigned seed = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    const auto make = [&](int heads) {
      auto array = std::make_shared<Array>(dtype, std::max<std::int64_t>(total, 1) * row_elements(heads), misaligned);
      for (std::int64_t r = 0; r < total; ++r) {
        for (int h = 0; h < heads; ++h) {
          for (int d = 0; d < head_dim; ++d) array->set(index(heads, r, h, d), normal(random));
        }
      }
      return array;
    };
    q = make(num_q_heads), k = make(num_kv_heads), v = make(num_kv_heads);
    const std::int64_t last = offsets.back(), first = offsets.front();
    for (std::int64_t r = 0; r < total; ++r) {  // rows that no sequence owns hold NaN
      if (r >= first && r < last) continue;
      for (int d = 0; d < head_dim; ++d) {
        for (int h = 0; h < num_q_heads; ++h) q->set(index(num_q_heads, r, h, d), static_cast<double>(kNan));
        for (int h = 0; h < num_kv_heads; ++h) {
          k->set(index(num_kv_heads, r, h, d), static_cast<double>(kNan));
          v->set(index(num_kv_heads, r, h, d), static_cast<double>(kNan));
        }
      }
    }
  }

  std::int64_t index(int heads, std::int64_t row, int head, int d) const {
    return row * row_elements(heads) + head * std::int64_t{head_dim + (padded ? 8 : 0)} + d;
  }

  void run() {
    out = std::make_shared<Array>(dtype, std::max<std::int64_t>(total, 1) * row_elements(num_q_heads), misaligned);
    lse.assign(static_cast<std::size_t>(total * num_q_heads), kNan);
    const std::int64_t head_stride = head_dim + (padded ? 8 : 0);
    params.q = {q->at(0), row_elements(num_q_heads), head_stride};
    params.k = {k->at(0), row_elements(num_kv_heads), head_stride};
    params.v = {v->at(0), row_elements(num_kv_heads), head_stride};
    params.out = out->at(0);
    params.out_row_stride = row_elements(num_q_heads);
    params.out_head_stride = head_stride;
    params.lse = lse.data();
    params.lse_row_stride = 1;  // [num_q_heads, total], transposed
    params.lse_head_stride = total;
    params.rows = {{offsets.data(), 1, IntegerType::kI64}, static_cast<std::int64_t>(offsets.size()) - 1, total};
    params.dtype = dtype;
    params.num_q_heads = num_q_heads;
    params.num_kv_heads = num_kv_heads;
    params.head_dim = head_dim;
    params.mask = mask;
    params.scale = scale;
    ragged_flash_attention_cpu(params);
  }

  Comparison compare() const {
    Comparison comparison;
    for (std::int64_t r = 0; r < total; ++r) {
      std::int64_t begin = 0, end = 0;
      for (std::size_t b = 0; b + 1 < offsets.size(); ++b) {
        if (offsets[b] <= r && r < offsets[b + 1]) begin = offsets[b], end = offsets[b + 1];
      }
      std::vector<std::int64_t> keys;
      for (std::int64_t j = begin; j < end; ++j) {
        if (sees(mask, r - begin, j - begin)) keys.push_back(j);
      }
      for (int h = 0; h < num_q_heads; ++h) {
        const int kv = h / (num_q_heads / num_kv_heads);
        const RowResult row =
            attend([&](int d) { return q->get(index(num_q_heads, r, h, d)); }, static_cast<std::int64_t>(keys.size()),
                   [&](std::int64_t j, int d) {
                     return k->get(index(num_kv_heads, keys[static_cast<std::size_t>(j)], kv, d));
                   },
                   [&](std::int64_t j, int d) {
                     return v->get(index(num_kv_heads, keys[static_cast<std::size_t>(j)], kv, d));
                   },
                   head_dim, static_cast<double>(scale));
        for (int d = 0; d < head_dim; ++d)
          comparison.out(out->get(index(num_q_heads, r, h, d)), row.out[static_cast<std::size_t>(d)]);
        comparison.lse(static_cast<double>(lse[static_cast<std::size_t>(h * total + r)]), row.lse);
      }
    }
    return comparison;
  }

  // The padding between rows and heads of `out` is not ours to write.
  bool padding_untouched() const {
    std::vector<bool> owned(static_cast<std::size_t>(out->size()), false);
    for (std::int64_t r = 0; r < total; ++r) {
      for (int h = 0; h < num_q_heads; ++h) {
        for (int d = 0; d < head_dim; ++d) owned[static_cast<std::size_t>(index(num_q_heads, r, h, d))] = true;
      }
    }
    for (std::int64_t i = 0; i < out->size(); ++i) {
      if (!owned[static_cast<std::size_t>(i)] && !std::isnan(out->get(i))) return false;
    }
    return true;
  }

  void check() {
    allocate();
    run();
    CAPTURE(to_string_(dtype));
    CAPTURE(num_q_heads);
    CAPTURE(num_kv_heads);
    CAPTURE(head_dim);
    CAPTURE(total);
    CAPTURE(static_cast<int>(mask.kind));
    CAPTURE(mask.window);
    compare().check(dtype);
    CHECK(padding_untouched());
  }

  static std::string to_string_(DType d) { return d == kFloat32 ? "float32" : d == kFloat16 ? "float16" : "bfloat16"; }
};

std::vector<Mask> all_masks(std::initializer_list<std::int64_t> windows) {
  std::vector<Mask> masks{{MaskKind::kNull, -1}, {MaskKind::kCausal, -1}};
  for (const std::int64_t w : windows) {
    for (const MaskKind kind : {MaskKind::kSlidingWindowCausal, MaskKind::kSlidingWindowNoncausal, MaskKind::kChunked,
                                MaskKind::kChunkedCausal}) {
      masks.push_back({kind, w});
    }
  }
  return masks;
}

TEST_CASE("ragged: masks, with sequences of many lengths, gaps and empty sequences") {
  for_each_isa([] {
    for (const Mask& mask : all_masks({1, 2, 7, 40, 150, 1000})) {
      RaggedCase c;
      c.num_q_heads = 2;
      c.head_dim = 16;
      c.offsets = {3, 4, 4, 6, 13, 30, 60, 150, 460};
      c.total = 465;
      c.mask = mask;
      c.check();
    }
  });
}

TEST_CASE("ragged: every short length") {
  for_each_isa([] {
    for (std::int64_t n = 1; n <= 40; ++n) {
      for (const Mask& mask : all_masks({3})) {
        RaggedCase c;
        c.num_q_heads = 1;
        c.head_dim = 8;
        c.offsets = {0, n};
        c.total = n;
        c.mask = mask;
        c.check();
      }
    }
  });
}

TEST_CASE("ragged: every head dim") {
  for_each_isa([] {
    for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
      for (const DType dtype : {kFloat32, kFloat16, kBFloat16}) {
        RaggedCase c;
        c.dtype = dtype;
        c.head_dim = head_dim;
        c.offsets = {1, 8, 47};
        c.total = 49;
        c.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
        c.padded = head_dim % 16 == 8;
        c.misaligned = head_dim % 32 == 8;
        c.check();
      }
    }
  });
}

TEST_CASE("ragged: group sizes, past one tile of heads too") {
  for_each_isa([] {
    for (const int group : {1, 2, 3, 5, 7, 8, 12, 64, 144, 145, 300}) {
      for (const int num_kv_heads : {1, 3}) {
        if (group > 12 && num_kv_heads > 1) continue;
        RaggedCase c;
        c.num_kv_heads = num_kv_heads;
        c.num_q_heads = group * num_kv_heads;
        c.head_dim = 24;
        c.offsets = {0, 2, 21};
        c.total = 21;
        c.mask = {MaskKind::kSlidingWindowCausal, 6};
        c.padded = group % 2 == 0;
        c.check();
      }
    }
  });
}

TEST_CASE("ragged: several key blocks at the head dims of each block size") {
  for_each_isa([] {
    for (const int head_dim : {64, 128, 192}) {
      for (const Mask& mask :
           {Mask{MaskKind::kNull, -1}, Mask{MaskKind::kCausal, -1}, Mask{MaskKind::kSlidingWindowCausal, 100}}) {
        RaggedCase c;
        c.num_q_heads = 1;
        c.head_dim = head_dim;
        c.offsets = {0, 530};
        c.total = 530;
        c.mask = mask;
        c.check();
      }
    }
  });
}

TEST_CASE("ragged: scale zero, negative and large") {
  for_each_isa([] {
    for (const float scale : {0.0f, -0.3f, 3.0f}) {
      for (const Mask& mask : all_masks({5})) {
        RaggedCase c;
        c.head_dim = 32;
        c.offsets = {0, 37};
        c.total = 37;
        c.mask = mask;
        c.scale = scale;
        c.check();
      }
    }
  });
}

TEST_CASE("ragged: NaN and infinity reach exactly the rows that see them") {
  for_each_isa([] {
    const float values[] = {kNan, kInf, -kInf};
    for (const Mask& mask : all_masks({1, 4, 30})) {
      for (const float value : values) {
        for (const bool in_k : {true, false}) {
          for (const std::int64_t key : {0, 3, 17, 39}) {
            RaggedCase c;
            c.num_q_heads = 2;
            c.head_dim = 16;
            c.offsets = {0, 40, 60};
            c.total = 60;
            c.mask = mask;
            c.allocate();
            (in_k ? c.k : c.v)->set(c.index(1, key, 0, 5), static_cast<double>(value));
            c.run();
            CAPTURE(static_cast<int>(mask.kind));
            CAPTURE(mask.window);
            CAPTURE(value);
            CAPTURE(key);
            c.compare().check(c.dtype);
          }
        }
      }
    }
  });
}

TEST_CASE("ragged: rows whose visible scores are all -inf are empty, whatever V holds") {
  for_each_isa([] {
    RaggedCase c;
    c.num_q_heads = 1;
    c.head_dim = 8;
    c.offsets = {0, 300};
    c.total = 300;
    c.mask = {MaskKind::kSlidingWindowCausal, 2};
    c.allocate();
    for (std::int64_t r = 0; r < 300; ++r) c.q->set(c.index(1, r, 0, 0), 1.0);
    for (const std::int64_t key : {0, 1, 2, 255, 256, 257}) {
      c.k->set(c.index(1, key, 0, 0), -static_cast<double>(kInf));
      for (int d = 0; d < 8; ++d) c.v->set(c.index(1, key, 0, d), static_cast<double>(d % 2 == 0 ? kNan : kInf));
    }
    c.run();
    int bad = 0;
    for (const std::int64_t row : {0, 1, 2, 256, 257}) {
      for (int d = 0; d < 8; ++d) bad += c.out->get(c.index(1, row, 0, d)) != 0.0;
      bad += c.lse[static_cast<std::size_t>(row)] != -kInf;
    }
    CHECK(bad == 0);
  });
}

TEST_CASE("ragged: a sequence's bits depend on nothing but itself") {
  for_each_isa([] {
    for (const Mask& mask : all_masks({50})) {
      RaggedCase batch;
      batch.num_q_heads = 6;
      batch.num_kv_heads = 2;
      batch.head_dim = 72;
      batch.offsets = {2, 9, 309, 320};
      batch.total = 330;
      batch.mask = mask;
      batch.allocate();
      batch.run();
      const auto same = [&](const RaggedCase& other, std::int64_t shift) {
        bool equal = true;
        for (std::int64_t r = 9; r < 309; ++r) {
          equal = equal && std::memcmp(batch.out->at(batch.index(6, r, 0, 0)),
                                       other.out->at(batch.index(6, r - shift, 0, 0)), sizeof(float) * 6 * 72) == 0;
          for (int h = 0; h < 6; ++h) {
            equal = equal && batch.lse[static_cast<std::size_t>(h * batch.total + r)] ==
                                 other.lse[static_cast<std::size_t>(h * other.total + r - shift)];
          }
        }
        return equal;
      };
      RaggedCase alone = batch;
      alone.offsets = {0, 300};
      alone.total = 300;
      alone.allocate();
      for (std::int64_t r = 0; r < 300; ++r) {
        std::memcpy(alone.q->at(alone.index(6, r, 0, 0)), batch.q->at(batch.index(6, r + 9, 0, 0)),
                    sizeof(float) * 6 * 72);
        std::memcpy(alone.k->at(alone.index(2, r, 0, 0)), batch.k->at(batch.index(2, r + 9, 0, 0)),
                    sizeof(float) * 2 * 72);
        std::memcpy(alone.v->at(alone.index(2, r, 0, 0)), batch.v->at(batch.index(2, r + 9, 0, 0)),
                    sizeof(float) * 2 * 72);
      }
      alone.run();
      CHECK(same(alone, 9));
      const int before = num_threads();
      for (const int threads : {1, 2, 5}) {
        set_num_threads(threads);
        RaggedCase again = batch;
        again.run();
        CHECK(same(again, 0));
      }
      set_num_threads(before);
    }
  });
}

TEST_CASE("ragged: garbage offsets read and write nothing outside the tensors") {
  for_each_isa([] {
    const std::int64_t values[] = {
        -1, 0, 3, 7, 8, 1000, std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()};
    const int before = num_threads();
    set_num_threads(1);  // sequences may overlap: only one thread may write their rows
    for (const std::int64_t a : values) {
      for (const std::int64_t b : values) {
        for (const std::int64_t d : values) {
          RaggedCase c;
          c.head_dim = 8;
          c.offsets = {a, b, d};
          c.total = 7;
          c.q = std::make_shared<Array>(kFloat32, 7 * 2 * 8);
          c.k = std::make_shared<Array>(kFloat32, 7 * 8);
          c.v = std::make_shared<Array>(kFloat32, 7 * 8);
          c.run();
        }
      }
    }
    set_num_threads(before);
    CHECK(true);
  });
}

TEST_CASE("ragged: nothing to do") {
  for_each_isa([] {
    RaggedCase c;
    c.total = 0;
    c.offsets = {0, 0, 0};
    c.allocate();
    c.run();
    c.params.q.data = c.params.k.data = c.params.v.data = nullptr;
    c.params.out = nullptr;
    ragged_flash_attention_cpu(c.params);
    // No sequence: every row is empty.
    RaggedCase none;
    none.offsets = {0};
    none.total = 200;
    none.check();
    RaggedCase no_heads;
    no_heads.allocate();
    no_heads.run();
    no_heads.params.num_q_heads = 0;
    ragged_flash_attention_cpu(no_heads.params);
    // Without an LSE.
    RaggedCase plain;
    plain.allocate();
    plain.run();
    plain.params.lse = nullptr;
    ragged_flash_attention_cpu(plain.params);
  });
}

TEST_CASE("ragged: stride 0 and negative strides") {
  for_each_isa([] {
    RaggedCase c;
    c.num_q_heads = 4;
    c.num_kv_heads = 2;
    c.head_dim = 16;
    c.offsets = {0, 30};
    c.total = 30;
    c.allocate();
    c.run();
    // Rows backwards: the same rows in the opposite order, read with a negative stride.
    RaggedCase backwards = c;
    backwards.q = std::make_shared<Array>(kFloat32, c.q->size());
    for (std::int64_t r = 0; r < 30; ++r) {
      std::memcpy(backwards.q->at((29 - r) * 64), c.q->at(r * 64), 64 * sizeof(float));
    }
    RaggedParams params = c.params;
    params.q.data = backwards.q->at(29 * 64);
    params.q.row_stride = -64;
    Array out(kFloat32, c.out->size());
    params.out = out.at(0);
    ragged_flash_attention_cpu(params);
    CHECK(std::memcmp(out.at(0), c.out->at(0), static_cast<std::size_t>(out.size()) * sizeof(float)) == 0);
    // One key row for all, and one head for both.
    params = c.params;
    params.k.row_stride = params.k.head_stride = params.v.row_stride = params.v.head_stride = 0;
    params.out = out.at(0);
    ragged_flash_attention_cpu(params);
    double error = 0.0;
    for (std::int64_t i = 0; i < out.size(); ++i) error = std::max(error, std::fabs(out.get(i) - c.v->get(i % 16)));
    CHECK(error < 1e-5);
  });
}

// --- qsa_sparse_attention
// ---------------------------------------------------------------------------------------------

struct QsaCase {
  DType dtype = kFloat32, out_dtype = kFloat32;
  int num_q_heads = 4, num_kv_heads = 2, head_dim = 32;
  std::vector<std::int64_t> offsets{0, 3};
  std::vector<std::int64_t> cache_lengths{20};
  std::int64_t total = 3, page_size = 4, num_pages = 16, max_pages = 8, selection_width = 9;
  float scale = 0.2f;
  bool misaligned = false;

  std::vector<std::int32_t> table, tokens, counts;
  std::shared_ptr<Array> q, kv, out;
  std::vector<float> lse;
  QsaParams params;

  std::int64_t token_elements() const { return std::int64_t{num_kv_heads} * head_dim; }
  std::int64_t cache_index(std::int64_t page, int which, std::int64_t offset, int head, int d) const {
    return ((page * 2 + which) * page_size + offset) * token_elements() + std::int64_t{head} * head_dim + d;
  }
  std::int64_t index(std::int64_t row, int head, int d) const {
    return (row * num_q_heads + head) * std::int64_t{head_dim} + d;
  }
  std::int64_t batch() const { return static_cast<std::int64_t>(offsets.size()) - 1; }

  void allocate(unsigned seed = 1) {
    std::mt19937 random(seed);
    q = std::make_shared<Array>(dtype, total * num_q_heads * head_dim, misaligned);
    kv = std::make_shared<Array>(dtype, num_pages * 2 * page_size * token_elements(), misaligned);
    q->randomize(random);
    kv->randomize(random);
    table.resize(static_cast<std::size_t>(batch() * max_pages));
    for (std::int32_t& page : table) page = static_cast<std::int32_t>(random() % static_cast<unsigned>(num_pages));
    tokens.resize(static_cast<std::size_t>(total * selection_width));
    for (std::int32_t& token : tokens) token = static_cast<std::int32_t>(random() % 45) - 5;  // some out of range
    counts.resize(static_cast<std::size_t>(total));
    for (std::int32_t& count : counts)
      count = static_cast<std::int32_t>(random() % static_cast<unsigned>(selection_width + 4)) - 1;
  }

  void prepare() {
    out = std::make_shared<Array>(out_dtype, total * num_q_heads * head_dim, misaligned);
    lse.assign(static_cast<std::size_t>(total * num_q_heads), kNan);
    params.q = q->at(0);
    params.q_row_stride = std::int64_t{num_q_heads} * head_dim;
    params.q_head_stride = head_dim;
    params.out = out->at(0);
    params.out_row_stride = params.q_row_stride;
    params.out_head_stride = head_dim;
    params.lse = lse.data();
    params.lse_row_stride = num_q_heads;
    params.lse_head_stride = 1;
    params.rows = {{offsets.data(), 1, IntegerType::kI64}, batch(), total};
    params.cache_lengths = {cache_lengths.data(), 1, IntegerType::kI64};
    params.cache.k = kv->at(0);
    params.cache.v = kv->at(page_size * token_elements());
    params.cache.page_stride = 2 * page_size * token_elements();
    params.cache.token_stride = token_elements();
    params.cache.head_stride = head_dim;
    params.cache.num_pages = num_pages;
    params.cache.page_size = page_size;
    params.cache.max_pages = max_pages;
    params.cache.lookup_table = {{table.data(), 1, IntegerType::kI32}, max_pages};
    params.token_indices = tokens.data();
    params.token_indices_row_stride = selection_width;
    params.counts = counts.data();
    params.selection_width = selection_width;
    params.dtype = dtype;
    params.out_dtype = out_dtype;
    params.num_q_heads = num_q_heads;
    params.num_kv_heads = num_kv_heads;
    params.head_dim = head_dim;
    params.scale = scale;
  }

  void run() {
    prepare();
    qsa_sparse_attention_cpu(params);
  }

  // What row r attends to, as (page, offset in the page).
  std::vector<std::pair<std::int64_t, std::int64_t>> attended(std::int64_t r) const {
    std::vector<std::pair<std::int64_t, std::int64_t>> result;
    for (std::int64_t b = 0; b < batch(); ++b) {
      const std::int64_t begin = offsets[static_cast<std::size_t>(b)], end = offsets[static_cast<std::size_t>(b + 1)];
      if (r < begin || r >= end) continue;
      const std::int64_t length = std::max<std::int64_t>(cache_lengths[static_cast<std::size_t>(b)], 0) + end - begin;
      for (std::int64_t i = 0; i < std::min<std::int64_t>(counts[static_cast<std::size_t>(r)], selection_width); ++i) {
        const std::int64_t t = tokens[static_cast<std::size_t>(r * selection_width + i)];
        if (t < 0 || t >= length || t / page_size >= max_pages) continue;
        const std::int64_t page = table[static_cast<std::size_t>(b * max_pages + t / page_size)];
        if (page >= 0 && page < num_pages) result.push_back({page, t % page_size});
      }
    }
    return result;
  }

  Comparison compare() const {
    Comparison comparison;
    for (std::int64_t r = 0; r < total; ++r) {
      const auto keys = attended(r);
      for (int h = 0; h < num_q_heads; ++h) {
        const int kv_head = h / (num_q_heads / num_kv_heads);
        const auto element = [&](int which) {
          return [&, which](std::int64_t j, int d) {
            const auto& key = keys[static_cast<std::size_t>(j)];
            return kv->get(cache_index(key.first, which, key.second, kv_head, d));
          };
        };
        const RowResult row =
            attend([&](int d) { return q->get(index(r, h, d)); }, static_cast<std::int64_t>(keys.size()), element(0),
                   element(1), head_dim, static_cast<double>(scale));
        for (int d = 0; d < head_dim; ++d)
          comparison.out(out->get(index(r, h, d)), row.out[static_cast<std::size_t>(d)]);
        comparison.lse(static_cast<double>(lse[static_cast<std::size_t>(r * num_q_heads + h)]), row.lse);
      }
    }
    return comparison;
  }
};

TEST_CASE("qsa: dtypes of input and output, head dims and groups") {
  for_each_isa([] {
    for (const DType dtype : {kFloat32, kFloat16, kBFloat16}) {
      for (const DType out_dtype : {kFloat32, kFloat16, kBFloat16}) {
        for (int head_dim = 8; head_dim <= 256; head_dim += head_dim < 80 ? 8 : 88) {
          QsaCase c;
          c.dtype = dtype;
          c.out_dtype = out_dtype;
          c.head_dim = head_dim;
          c.misaligned = head_dim % 16 == 8;
          c.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
          c.allocate();
          c.run();
          CAPTURE(head_dim);
          c.compare().check(out_dtype);
        }
      }
    }
    for (const int group : {1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 24, 200}) {
      QsaCase c;
      c.num_q_heads = 2 * group;
      c.offsets = {1, 2, 2, 6, 8};
      c.cache_lengths = {0, 7, -3, 21};
      c.total = 9;
      c.allocate();
      c.run();
      CAPTURE(group);
      c.compare().check(kFloat32);
    }
  });
}

TEST_CASE("qsa: lists longer than a block, with repetitions and bad entries") {
  for_each_isa([] {
    for (const std::int64_t width : {0, 1, 2, 63, 64, 65, 127, 128, 200, 333}) {
      for (const std::int64_t page_size : {1, 3, 16}) {
        QsaCase c;
        c.offsets = {0, 2, 5};
        c.cache_lengths = {13, 30};
        c.total = 5;
        c.selection_width = width;
        c.page_size = page_size;
        c.allocate();
        c.table[0] = -1;
        c.table[2] = 16;
        c.table[3] = std::numeric_limits<std::int32_t>::max();
        if (width > 0) c.tokens[0] = std::numeric_limits<std::int32_t>::max();
        c.counts[0] = std::numeric_limits<std::int32_t>::max();
        c.counts[1] = std::numeric_limits<std::int32_t>::min();
        c.counts[2] = static_cast<std::int32_t>(width);
        c.run();
        CAPTURE(width);
        CAPTURE(page_size);
        c.compare().check(kFloat32);
      }
    }
  });
}

TEST_CASE("qsa: what a row does not list never reaches it") {
  for_each_isa([] {
    for (const float value : {kNan, kInf}) {
      QsaCase c;
      c.num_pages = 8;
      c.max_pages = 2;
      c.offsets = {0, 1, 2};
      c.cache_lengths = {7, 7};
      c.total = 2;
      c.selection_width = 6;
      c.allocate();
      c.table = {1, 3, 3, 5};
      c.tokens = {0, 5, 0, 2, 99, 1, /**/ 6, 1, 1, 3, -1, 2};
      c.counts = {4, 3};
      // Everything but the tokens that rows list, and one that only row 1 lists, is poison.
      std::vector<bool> keep(static_cast<std::size_t>(8 * 4), false);
      for (const auto& key : c.attended(0)) keep[static_cast<std::size_t>(key.first * 4 + key.second)] = true;
      for (std::int64_t page = 0; page < 8; ++page) {
        for (std::int64_t offset = 0; offset < 4; ++offset) {
          if (keep[static_cast<std::size_t>(page * 4 + offset)]) continue;
          for (int which = 0; which < 2; ++which) {
            for (int head = 0; head < 2; ++head) {
              for (int d = 0; d < 32; ++d)
                c.kv->set(c.cache_index(page, which, offset, head, d), static_cast<double>(value));
            }
          }
        }
      }
      c.run();
      c.compare().check(kFloat32);
      CHECK(std::isfinite(c.out->get(0)));
      CHECK(std::isnan(c.out->get(c.index(1, 0, 0))));
    }
  });
}

TEST_CASE("qsa: scale zero and negative, and scores of -inf") {
  for_each_isa([] {
    for (const float scale : {0.0f, -0.4f, 2.0f}) {
      QsaCase c;
      c.scale = scale;
      c.selection_width = 90;
      c.allocate();
      c.run();
      c.compare().check(kFloat32);
    }
    QsaCase c;
    c.allocate();
    for (std::int64_t i = 0; i < c.q->size(); ++i) c.q->set(i, 1.0);
    for (std::int64_t page = 0; page < c.num_pages; ++page) {
      for (std::int64_t i = 0; i < c.page_size * c.token_elements(); ++i) {
        c.kv->set(page * 2 * c.page_size * c.token_elements() + i, -static_cast<double>(kInf));
      }
    }
    c.run();
    int bad = 0;
    for (std::int64_t i = 0; i < c.out->size(); ++i) bad += c.out->get(i) != 0.0;
    for (const float lse : c.lse) bad += lse != -kInf;
    CHECK(bad == 0);
  });
}

TEST_CASE("qsa: a row's bits depend on nothing but itself") {
  for_each_isa([] {
    QsaCase c;
    c.num_q_heads = 14;
    c.head_dim = 72;
    c.offsets = {0, 4, 9};
    c.cache_lengths = {20, 11};
    c.total = 11;
    c.selection_width = 150;
    c.allocate();
    c.run();
    const std::size_t row_bytes = sizeof(float) * 14 * 72;
    const int before = num_threads();
    for (const int threads : {1, 3, 8}) {  // with 8 threads a row's heads are tasks of their own
      set_num_threads(threads);
      QsaCase again = c;
      again.run();
      CHECK(std::memcmp(again.out->at(0), c.out->at(0), row_bytes * 11) == 0);
    }
    set_num_threads(before);
    // Each row alone, its sequence given by the optional array.
    bool equal = true;
    for (std::int64_t r = 0; r < 11; ++r) {
      const std::int32_t sequence = r < 4 ? 0 : r < 9 ? 1 : -1;
      QsaParams params = c.params;
      Array out(kFloat32, 14 * 72);
      const std::int64_t offsets[] = {0, 4, 9};
      params.q = c.q->at(r * 14 * 72);
      params.out = out.at(0);
      params.lse = nullptr;
      params.rows = {{offsets, 1, IntegerType::kI64}, 2, 1};
      params.rows.total = 1;
      params.row_to_sequence = &sequence;
      params.token_indices = c.tokens.data() + r * 150;
      params.counts = c.counts.data() + r;
      // The number of new rows is taken from the offsets, which are clamped to the one row here.
      std::int64_t lengths[] = {20 + 4 - 1, 11 + 5};
      params.cache_lengths = {lengths, 1, IntegerType::kI64};
      qsa_sparse_attention_cpu(params);
      equal = equal && std::memcmp(out.at(0), c.out->at(r * 14 * 72), row_bytes) == 0;
    }
    CHECK(equal);
  });
}

TEST_CASE("qsa: nothing to do") {
  for_each_isa([] {
    QsaCase c;
    c.selection_width = 0;
    c.allocate();
    c.prepare();
    c.params.token_indices = nullptr;
    qsa_sparse_attention_cpu(c.params);
    c.compare().check(kFloat32);
    c.params.rows.total = 0;
    c.params.q = nullptr;
    c.params.out = nullptr;
    qsa_sparse_attention_cpu(c.params);
    QsaCase none;
    none.offsets = {0};
    none.cache_lengths = {};
    none.allocate();
    none.run();
    none.compare().check(kFloat32);
    QsaCase no_pages;
    no_pages.num_pages = 1;
    no_pages.allocate();
    no_pages.num_pages = 0;
    no_pages.run();
    no_pages.compare().check(kFloat32);
  });
}

TEST_CASE("qsa: pages, tokens and lists backwards in memory") {
  for_each_isa([] {
    QsaCase c;
    c.allocate();
    c.run();
    const std::int64_t page = 2 * c.page_size * c.token_elements();
    Array reversed(kFloat32, c.kv->size());
    for (std::int64_t p = 0; p < c.num_pages; ++p) {
      std::memcpy(reversed.at((c.num_pages - 1 - p) * page), c.kv->at(p * page),
                  static_cast<std::size_t>(page) * sizeof(float));
    }
    QsaParams params = c.params;
    params.cache.k = reversed.at((c.num_pages - 1) * page);
    params.cache.v = reversed.at((c.num_pages - 1) * page + page / 2);
    params.cache.page_stride = -page;
    Array out(kFloat32, c.out->size());
    params.out = out.at(0);
    std::vector<std::int32_t> tokens(c.tokens.size()), counts(c.counts.rbegin(), c.counts.rend());
    for (std::int64_t r = 0; r < c.total; ++r) {
      std::copy_n(c.tokens.begin() + r * c.selection_width, c.selection_width,
                  tokens.begin() + (c.total - 1 - r) * c.selection_width);
    }
    params.token_indices = tokens.data() + (c.total - 1) * c.selection_width;
    params.token_indices_row_stride = -c.selection_width;
    params.counts = counts.data() + c.total - 1;
    params.counts_stride = -1;
    qsa_sparse_attention_cpu(params);
    CHECK(std::memcmp(out.at(0), c.out->at(0), static_cast<std::size_t>(out.size()) * sizeof(float)) == 0);
  });
}

// One listed token has the weight 1, so its V passes through the kernel's conversions unchanged but for rounding.
std::vector<std::uint32_t> pass_through(const std::vector<std::uint32_t>& bits, DType dtype, DType out_dtype) {
  const std::int64_t n = static_cast<std::int64_t>(bits.size()) / 8;
  const std::int64_t in_bytes = dtype.bytes(), out_bytes = out_dtype.bytes();
  std::vector<char> v(static_cast<std::size_t>(n * 8 * in_bytes)), zeros(v.size(), 0);
  std::vector<char> out(static_cast<std::size_t>(n * 8 * out_bytes));
  for (std::size_t i = 0; i < bits.size(); ++i)
    std::memcpy(v.data() + static_cast<std::int64_t>(i) * in_bytes, &bits[i], static_cast<std::size_t>(in_bytes));
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(n)), counts(static_cast<std::size_t>(n), 1);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i);
  const std::int64_t offsets[] = {0, n}, lengths[] = {0};
  const std::int32_t table[] = {0};
  QsaParams params;
  params.q = zeros.data();
  params.q_row_stride = params.q_head_stride = 8;
  params.out = out.data();
  params.out_row_stride = params.out_head_stride = 8;
  params.rows = {{offsets, 1, IntegerType::kI64}, 1, n};
  params.cache_lengths = {lengths, 1, IntegerType::kI64};
  params.cache.k = zeros.data();
  params.cache.v = v.data();
  params.cache.token_stride = 8;
  params.cache.num_pages = params.cache.max_pages = 1;
  params.cache.page_size = n;
  params.cache.lookup_table = {{table, 1, IntegerType::kI32}, 1};
  params.token_indices = tokens.data();
  params.token_indices_row_stride = 1;
  params.counts = counts.data();
  params.selection_width = 1;
  params.dtype = dtype;
  params.out_dtype = out_dtype;
  params.num_q_heads = params.num_kv_heads = 1;
  params.head_dim = 8;
  qsa_sparse_attention_cpu(params);
  std::vector<std::uint32_t> result(bits.size(), 0);
  for (std::size_t i = 0; i < bits.size(); ++i)
    std::memcpy(&result[i], out.data() + static_cast<std::int64_t>(i) * out_bytes, static_cast<std::size_t>(out_bytes));
  return result;
}

float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

bool same_value(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

TEST_CASE("conversions: every float16 and bfloat16 to float32 and back") {
  for_each_isa([] {
    std::vector<std::uint32_t> all(65536);
    for (std::uint32_t i = 0; i < 65536; ++i) all[i] = i;
    for (const DType dtype : {kFloat16, kBFloat16}) {
      const std::vector<std::uint32_t> wide = pass_through(all, dtype, kFloat32);
      const std::vector<std::uint32_t> same = pass_through(all, dtype, dtype);
      int bad = 0;
      for (std::uint32_t i = 0; i < 65536; ++i) {
        const auto decode = [&](std::uint32_t bits) {
          return dtype == kFloat16 ? decode_half(static_cast<std::uint16_t>(bits))
                                   : static_cast<double>(float_of(bits << 16));
        };
        bad += !same_value(static_cast<double>(float_of(wide[i])), decode(i));
        bad += !same_value(decode(same[i]), decode(i));
      }
      CHECK(bad == 0);
    }
  });
}

TEST_CASE("conversions: float32 rounds to nearest even at, below and above every tie") {
  for_each_isa([] {
    for (const DType dtype : {kFloat16, kBFloat16}) {
      std::vector<std::uint32_t> inputs;
      for (std::uint32_t i = 0; i < 32768; ++i) {
        // The tie between the i-th value and the next, and its neighbours; for float16 in half a subnormal's steps too.
        const float value =
            dtype == kFloat16 ? static_cast<float>(decode_half(static_cast<std::uint16_t>(i))) : float_of(i << 16);
        const float next = dtype == kFloat16 ? static_cast<float>(decode_half(static_cast<std::uint16_t>(i + 1)))
                                             : float_of((i + 1) << 16);
        std::uint32_t tie = bits_of(static_cast<float>((static_cast<double>(value) + static_cast<double>(next)) / 2));
        if (!std::isfinite(next)) tie = dtype == kFloat16 ? bits_of(65520.0f) : 0x7f7f8000u;
        if (!std::isfinite(value)) tie = (i << 16) | 0x7fc00001u;
        for (const std::uint32_t sign : {0u, 0x80000000u}) {
          for (const std::uint32_t bits : {tie, tie + 1, tie == 0 ? 0 : tie - 1, bits_of(value)})
            inputs.push_back(bits | sign);
        }
      }
      const std::vector<std::uint32_t> outputs = pass_through(inputs, kFloat32, dtype);
      int bad = 0;
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        const double expected = round_to(static_cast<double>(float_of(inputs[i])), dtype);
        const double actual = dtype == kFloat16 ? decode_half(static_cast<std::uint16_t>(outputs[i]))
                                                : static_cast<double>(float_of(outputs[i] << 16));
        bad += !same_value(actual, expected);
      }
      CHECK(bad == 0);
    }
  });
}

TEST_CASE("weights: accurate over the whole range, exactly 0 far below the maximum") {
  for_each_isa([] {
    // Two tokens with the scores 0 and -x: the second one's V is 1, so out / (1 - out) is exp(-x).
    double worst = 0.0;
    int not_zero = 0;
    for (double x = 0.0; x < 300.0; x += 0.03125) {
      QsaCase c;
      c.num_q_heads = c.num_kv_heads = 1;
      c.head_dim = 8;
      c.offsets = {0, 2};
      c.cache_lengths = {0};
      c.total = 2;
      c.page_size = 2;
      c.num_pages = c.max_pages = 1;
      c.selection_width = 2;
      c.scale = 1.0f;
      c.q = std::make_shared<Array>(kFloat32, 16);
      c.kv = std::make_shared<Array>(kFloat32, 32);
      for (int i = 0; i < 16; ++i) c.q->set(i, i % 8 == 0 ? 1.0 : 0.0);
      for (int i = 0; i < 32; ++i) c.kv->set(i, i == 8 ? -x : i >= 24 ? 1.0 : 0.0);
      c.table = {0};
      c.tokens = {0, 1, 1, 0};
      c.counts = {2, 2};
      c.run();
      const double expected = std::exp(-x) / (1.0 + std::exp(-x));
      for (const std::int64_t i : {0, 8}) {
        if (x < 86.0) worst = std::max(worst, std::fabs(c.out->get(i) - expected) / expected / std::max(1.0, x));
        if (x > 90.0) not_zero += c.out->get(i) != 0.0;
      }
    }
    // The score in base 2 is rounded once: half an ulp of it times x, plus an ulp or two of the exponential.
    CHECK(worst < 3e-7);
    CHECK(not_zero == 0);
  });
}

}  // namespace
}  // namespace ragged_attention
