// The places in a message about the largest elements, for the CPU and the CUDA code. csrc/cpu/sign/top_sign.hpp describes the
// format.
//
// All functions are `static constexpr`, so that CUDA kernels can call them too.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace topkube {

static constexpr std::size_t sign_block = 256;

// The layout of a message about `count` of `length` elements (1 <= count <= length < 2^32).
struct TopSignLayout {
  constexpr TopSignLayout(std::size_t length, std::size_t count)
      : length(length),
        count(count),
        low(static_cast<unsigned>(std::bit_width(length / count)) - 1),
        high(((length - 1) >> low) + count),
        plane_bytes(octets(count)),
        bits((count + sign_block - 1) / sign_block * sizeof(std::uint16_t)),
        planes(aligned(bits + octets(count))),
        unary(planes + low * plane_bytes),
        bytes(aligned(unary + octets(high))) {}

  std::size_t length, count;
  unsigned low;                     // how many of the lowest bits of an index are in planes
  std::size_t high;                 // bits of the unary part
  std::size_t plane_bytes;          // bytes of one plane
  std::size_t bits, planes, unary;  // the first bytes of the sign bits, of the planes and of the unary part
  std::size_t bytes;                // of the message

 private:
  static constexpr std::size_t octets(std::size_t bits) { return (bits + 7) / 8; }
  static constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 7) / 8 * 8; }
};

}  // namespace topkube
