#include "common/check_values.h"

#include <string>

#include "common/cuda_host.h"
#include "ragged_attention/error.h"

namespace ragged_attention {

void check_not_capturing(Device device, void* stream) {
  if (device.type != DeviceType::kCuda || !cuda_stream_is_capturing(device.index, stream)) return;
  throw ValueError(
      "check_values: expected False while the stream is being captured into a graph, got True; it would synchronise");
}

void check_offsets(const RaggedRows& rows, Device device, void* stream) {
  const OffsetsCheck check{rows};
  Evidence evidence;
  const std::int64_t i = device.type == DeviceType::kCuda ? cuda_first_bad(check, device.index, stream, &evidence)
                                                          : first_bad(check, &evidence);
  if (i < 0) return;
  throw ValueError("input_row_offsets: expected values that never fall and lie in [0, " + std::to_string(rows.total) +
                   "], got " + std::to_string(evidence.value) + " at position " + std::to_string(i) +
                   (i > 0 ? " after " + std::to_string(evidence.other) : std::string()));
}

}  // namespace ragged_attention
