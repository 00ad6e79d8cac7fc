// One bit per element, and one scale per block of 256 elements: what the algorithm `onebit` sends.
//
// The scale of a block is the mean |x| of its elements, rounded to bf16. The last block may be shorter; its mean counts the elements
// that exist. Bit i % 8 of byte i / 8 is the sign bit of element i. An element is sent as +scale or -scale.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/sign/layout.hpp"

namespace topkube {

// Writes the scales and the bits of `values`, and subtracts from every element what is sent of it, in one pass. `scales` has one
// entry per block, `bits` has (length + 7) / 8 bytes. Returns true if all scales are finite. A block with a NaN or an infinite
// element has a scale that is not finite.
bool sign_pack(float* values, std::size_t length, std::uint16_t* scales, std::uint8_t* bits);

// What one node sent.
struct SignPart {
  const std::uint16_t* scales;
  const std::uint8_t* bits;
  float weight;
};

// values += the sum of the parts times their weights, for `length` elements. A scale is multiplied by its weight first; the sum is
// computed in float32, in the order of the parts, and then added. `values` is read and written once.
void sign_unpack_add(float* values, std::size_t length, const std::vector<SignPart>& parts);

}  // namespace topkube
