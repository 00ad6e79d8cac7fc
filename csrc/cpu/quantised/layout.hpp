// The places in a message of integers, for the CPU and the CUDA code. csrc/cpu/quantised/quantised.hpp describes the format.
//
// All functions are `static constexpr`, so that CUDA kernels can call them too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace topkube {

static constexpr std::size_t quantised_block = 256;

// Returns the bytes of the integers of `length` elements. With 3 bits, this includes half a byte for every 32.
static constexpr std::size_t quantised_code_bytes(std::size_t length, int bits) {
  const std::size_t groups = (length + 31) / 32;
  return bits == 8 ? length : bits == 4 ? groups * 16 : groups * 12 + (groups + 1) / 2;
}

// The places of the parts of a message about `length` elements with `bits` bits each. The integers begin at a multiple of 8 bytes,
// so that a GPU can load words of them.
struct QuantisedLayout {
  constexpr QuantisedLayout(std::size_t length, int bits)
      : length(length),
        bits(bits),
        scales_end((length + quantised_block - 1) / quantised_block * sizeof(std::uint16_t)),
        codes((scales_end + 7) / 8 * 8),
        end(codes + quantised_code_bytes(length, bits)),
        bytes((end + 7) / 8 * 8) {}
  std::size_t length;
  int bits;
  std::size_t scales_end;  // the first byte after the scales; zeros follow
  std::size_t codes;       // the first byte of the integers
  std::size_t end;         // the first byte after them; zeros follow
  std::size_t bytes;
};

}  // namespace topkube
