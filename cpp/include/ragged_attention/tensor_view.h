// A tensor of any framework, as the library sees it: a pointer, a dtype, a shape, strides and a device.
//
// Nothing here owns memory. The types follow DLPack's encoding so that a dtype this library does not compute with can
// still be named in an error message.
#pragma once

#include <cstdint>
#include <string>

namespace ragged_attention {

// Element type in DLPack's encoding: a code (0 int, 1 uint, 2 float, 4 bfloat, 6 bool, ...), a width and a lane count.
struct DType {
  std::uint8_t code = 0;
  std::uint8_t bits = 0;
  std::uint16_t lanes = 1;

  constexpr bool operator==(const DType& other) const {
    return code == other.code && bits == other.bits && lanes == other.lanes;
  }
  constexpr bool operator!=(const DType& other) const { return !(*this == other); }
  constexpr std::int64_t bytes() const { return std::int64_t{bits} * lanes / 8; }
};

inline constexpr DType kInt32{0, 32, 1};
inline constexpr DType kInt64{0, 64, 1};
inline constexpr DType kUInt32{1, 32, 1};
inline constexpr DType kFloat16{2, 16, 1};
inline constexpr DType kFloat32{2, 32, 1};
inline constexpr DType kBFloat16{4, 16, 1};

// "float32", "bfloat16", "int64x4", ...
std::string to_string(DType dtype);

enum class DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kOther = 0 };

struct Device {
  DeviceType type = DeviceType::kCpu;
  std::int32_t index = 0;  // CUDA ordinal; 0 for the CPU. For kOther: DLPack's device type.

  constexpr bool operator==(const Device& other) const { return type == other.type && index == other.index; }
  constexpr bool operator!=(const Device& other) const { return !(*this == other); }
};

// "cpu", "cuda:1", ...
std::string to_string(Device device);

struct TensorView {
  static constexpr int kMaxRank = 8;

  void* data = nullptr;  // first element; may be null when the tensor has no element
  DType dtype;
  Device device;
  int rank = 0;                       // a tensor of higher rank is reported by its rank alone: never more than kMaxRank
  std::int64_t shape[kMaxRank] = {};  // dimensions, outermost first
  std::int64_t strides[kMaxRank] = {};  // in elements; may be 0 or negative; means nothing where the dimension is 1
  bool read_only = false;

  std::int64_t num_elements() const {
    std::int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
};

// "[3, 4, 128]"
std::string shape_string(const TensorView& tensor);

}  // namespace ragged_attention
