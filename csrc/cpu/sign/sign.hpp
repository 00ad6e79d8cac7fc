// The messages of the algorithm `onebit`: one bit per element, and a scale per block of 256 elements.
//
// The scale of a block is the mean |x| of its elements, rounded to bf16. The last block may be shorter; its mean counts the
// elements that exist. Bit i % 8 of byte i / 8 is the sign bit of element i. An element is sent as +scale or -scale.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/sign/layout.hpp"

namespace topkube {

// Writes the scales and the bits of `values`, and leaves in every element the part that is not sent, in one pass. `scales` has one
// entry per block, `bits` has (length + 7) / 8 bytes. Returns true if all scales are finite. A block with a NaN or an infinite
// element has a scale that is not finite.
bool sign_pack(float* values, std::size_t length, std::uint16_t* scales, std::uint8_t* bits);

// The message of one node.
struct SignPart {
  const std::uint16_t* scales;
  const std::uint8_t* bits;
  float weight;
};

// Writes what `sign_pack` writes of the differences values - base, and leaves both as they are.
bool sign_pack_difference(const float* values, const float* base, std::size_t length, std::uint16_t* scales, std::uint8_t* bits);

// Adds the sum of the parts times their weights to `values`, for `length` elements. A scale is multiplied by its weight first; the
// sum is computed in float32, in the order of the parts, and then added. `values` is read and written once.
void sign_unpack_add(float* values, std::size_t length, const std::vector<SignPart>& parts);

}  // namespace topkube
