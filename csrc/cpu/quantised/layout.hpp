// The places in a message of integers, for the CPU and the CUDA code. csrc/cpu/quantised/quantised.hpp describes the format.
//
// All functions are `static constexpr`, so that CUDA kernels can call them too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace topkube {

static constexpr std::size_t quantised_block = 256;

// Returns the bytes of the integers of `length` elements.
static constexpr std::size_t quantised_code_bytes(std::size_t length, int bits) {
  return bits == 8 ? length : (length + 31) / 32 * 16;
}

// The places of the parts of a message about `length` elements with `bits` bits each.
struct QuantisedLayout {
  constexpr QuantisedLayout(std::size_t length, int bits)
      : length(length),
        bits(bits),
        codes((length + quantised_block - 1) / quantised_block * sizeof(std::uint16_t)),
        end(codes + quantised_code_bytes(length, bits)),
        bytes((end + 7) / 8 * 8) {}
  std::size_t length;
  int bits;
  std::size_t codes;  // the first byte of the integers
  std::size_t end;    // the first byte after them; zeros follow
  std::size_t bytes;
};

}  // namespace topkube
