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
  const auto length_from = [&](std::size_t start) { return std::min(quantised_block, layout.length - start); };
  bool finite = true;
  QuantisedScale next = path.quantised_scale(values, length_from(0), layout.bits);
  for (std::size_t start = 0; start < layout.length; start += quantised_block) {
    const QuantisedScale scale = next;
    const std::size_t after = start + quantised_block;
    // The processor computes the scale of the next block while it packs this one: divisions take long.
    if (after < layout.length) next = path.quantised_scale(values + after, length_from(after), layout.bits);
    std::uint8_t* codes = message + layout.codes + quantised_code_bytes(start, layout.bits);
    path.quantised_pack(values + start, length_from(start), layout.bits, scale, codes);
    const auto stored = static_cast<std::uint16_t>(bits_of(scale.step) >> 16);  // a bf16 exactly
    std::memcpy(message + start / quantised_block * sizeof stored, &stored, sizeof stored);
    finite = finite && is_finite_bf16(stored);
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
