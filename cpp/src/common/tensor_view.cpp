#include "ragged_attention/tensor_view.h"

namespace ragged_attention {

std::string to_string(DType dtype) {
  std::string name;
  switch (dtype.code) {
    case 0:
      name = "int";
      break;
    case 1:
      name = "uint";
      break;
    case 2:
      name = "float";
      break;
    case 4:
      name = "bfloat";
      break;
    case 5:
      name = "complex";
      break;
    case 6:
      return "bool";
    default:
      name = dtype.code >= 7 && dtype.code <= 14 ? "float8 (DLPack code " : "an unknown dtype (DLPack code ";
      return name + std::to_string(dtype.code) + ", " + std::to_string(dtype.bits) + " bits)";
  }
  name += std::to_string(dtype.bits);
  if (dtype.lanes != 1) name += "x" + std::to_string(dtype.lanes);
  return name;
}

std::string to_string(Device device) {
  switch (device.type) {
    case DeviceType::kCpu:
      return "cpu";
    case DeviceType::kCuda:
      return "cuda:" + std::to_string(device.index);
    default:
      return "a device of DLPack type " + std::to_string(device.index);
  }
}

std::string shape_string(const TensorView& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.rank && i < TensorView::kMaxRank; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(tensor.shape[i]);
  }
  return text + "]";
}

}  // namespace ragged_attention
