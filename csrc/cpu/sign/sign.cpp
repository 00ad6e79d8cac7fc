#include "cpu/sign/sign.hpp"

#include <algorithm>

#include "cpu/dtype.hpp"
#include "cpu/float_state.hpp"
#include "cpu/paths/path.hpp"

namespace topkube {

namespace {

// Packs all blocks. find_block(start, count) returns the values of a block, which are overwritten.
template <class FindBlock>
bool pack_blocks(std::size_t length, std::uint16_t* scales, std::uint8_t* bits, const FindBlock& find_block) {
  const IeeeScope ieee;
  const PathKernels& path = active_path();
  bool finite = true;
  for (std::size_t start = 0; start < length; start += sign_block) {
    const std::size_t count = std::min(sign_block, length - start);
    const std::uint16_t scale = path.sign_pack(find_block(start, count), count, bits + start / 8);
    scales[start / sign_block] = scale;
    finite = finite && is_finite_bf16(scale);
  }
  return finite;
}

}  // namespace

bool sign_pack(float* values, std::size_t length, std::uint16_t* scales, std::uint8_t* bits) {
  return pack_blocks(length, scales, bits, [values](std::size_t start, std::size_t) { return values + start; });
}

bool sign_pack_difference(const float* values, const float* base, std::size_t length, std::uint16_t* scales, std::uint8_t* bits) {
  constexpr std::size_t ahead = 2 * sign_block;  // elements between a prefetch and its use
  float differences[sign_block + ahead];         // `sign_pack` prefetches so many elements behind a block
  return pack_blocks(length, scales, bits, [&](std::size_t start, std::size_t count) {
    for (std::size_t i = 0; i < count; i += 16) {
      __builtin_prefetch(values + start + i + ahead);
      __builtin_prefetch(base + start + i + ahead);
    }
    for (std::size_t i = 0; i < count; ++i) differences[i] = values[start + i] - base[start + i];
    return differences + 0;
  });
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
