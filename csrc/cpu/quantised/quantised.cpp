#include "cpu/quantised/quantised.hpp"

#include <algorithm>
#include <cstring>

#include "cpu/dtype.hpp"
#include "cpu/float_state.hpp"
#include "cpu/paths/path.hpp"

namespace topkube {

bool quantised_pack(float* values, const QuantisedLayout& layout, std::uint8_t* message) {
  const IeeeScope ieee;
  const PathKernels& path = active_path();
  bool finite = true;
  for (std::size_t start = 0; start < layout.length; start += quantised_block) {
    const std::size_t length = std::min(quantised_block, layout.length - start);
    std::uint8_t* codes = message + layout.codes + quantised_code_bytes(start, layout.bits);
    const std::uint16_t scale = path.quantised_pack(values + start, length, layout.bits, codes);
    std::memcpy(message + start / quantised_block * sizeof scale, &scale, sizeof scale);
    finite = finite && is_finite_bf16(scale);
  }
  std::memset(message + layout.scales_end, 0, layout.codes - layout.scales_end);
  std::memset(message + layout.end, 0, layout.bytes - layout.end);
  return finite;
}

void quantised_unpack_add(float* values, const QuantisedLayout& layout, const std::vector<const std::uint8_t*>& messages,
                          const std::vector<float>& weights, bool replaces) {
  const IeeeScope ieee;
  const PathKernels& path = active_path();
  std::vector<float> scales(messages.size());
  std::vector<const std::uint8_t*> codes(messages.size());
  for (std::size_t start = 0; start < layout.length; start += quantised_block) {
    for (std::size_t m = 0; m < messages.size(); ++m) {
      std::uint16_t scale;
      std::memcpy(&scale, messages[m] + start / quantised_block * sizeof scale, sizeof scale);
      scales[m] = from_bf16(scale) * weights[m];
      codes[m] = messages[m] + layout.codes + quantised_code_bytes(start, layout.bits);
    }
    const std::size_t length = std::min(quantised_block, layout.length - start);
    if (replaces) std::fill_n(values + start, length, 0.0f);  // stays in the first-level cache
    path.quantised_unpack_add(values + start, length, layout.bits, scales.data(), codes.data(), messages.size());
  }
}

}  // namespace topkube
