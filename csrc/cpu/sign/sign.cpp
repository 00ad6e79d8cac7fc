#include "cpu/sign/sign.hpp"

#include <algorithm>

#include "cpu/dtype.hpp"
#include "cpu/float_state.hpp"
#include "cpu/paths/path.hpp"

namespace topkube {

bool sign_pack(float* values, std::size_t length, std::uint16_t* scales, std::uint8_t* bits) {
  const IeeeScope ieee;
  const PathKernels& path = active_path();
  bool finite = true;
  for (std::size_t start = 0; start < length; start += sign_block) {
    const std::uint16_t scale = path.sign_pack(values + start, std::min(sign_block, length - start), bits + start / 8);
    scales[start / sign_block] = scale;
    finite = finite && is_finite_bf16(scale);
  }
  return finite;
}

void sign_unpack_add(float* values, std::size_t length, const std::vector<SignPart>& parts) {
  const IeeeScope ieee;
  const PathKernels& path = active_path();
  std::vector<float> scales(parts.size());
  std::vector<const std::uint8_t*> bits(parts.size());
  for (std::size_t start = 0; start < length; start += sign_block) {
    for (std::size_t p = 0; p < parts.size(); ++p) {
      scales[p] = from_bf16(parts[p].scales[start / sign_block]) * parts[p].weight;
      bits[p] = parts[p].bits + start / 8;
    }
    path.sign_unpack_add(values + start, std::min(sign_block, length - start), scales.data(), bits.data(), parts.size());
  }
}

}  // namespace topkube
