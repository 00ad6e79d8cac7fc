// The messages of the algorithms `int4` and `int8`: 4 or 8 bits per element, and a scale per block of 256 elements.
//
// With 8 bits, an element is sent as the integer nearest to x / scale, times the scale. With 4 bits, it is sent as the nearest square
// of an integer from 0 to 7, with the sign of x, times the scale: squares are close to each other near zero, so elements that are
// small for their block lose less than they would with 15 evenly spaced values. The scale of a block is its largest |x| divided by
// L = 127 or 49, rounded up to a bf16 number. If the scale would be below 2^-126, it is 0, and nothing of the block is sent.
//
// A message is the scales (bf16), then the integers with their signs (with 4 bits, the roots of the squares), both followed by zeros
// up to a multiple of 8 bytes. With 8 bits, element i has byte i. With 4 bits, 32 elements have 16 bytes: element j of the 32 has the low
// half of byte j, and element 16 + j its high half. Missing elements of the last 32 are zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/quantised/layout.hpp"

namespace topkube {

// Writes the message about `values`, and subtracts from every element what is sent of it. Returns true if all scales are finite. A
// block with a NaN or an infinite element has the scale NaN.
bool quantised_pack(float* values, const QuantisedLayout& layout, std::uint8_t* message);

// Adds the sum of the messages times their weights to `values`. A scale is multiplied by its weight first; the sum is computed in
// float32, in the order of the messages, and then added. `values` is read and written once. With `replaces`, the sum replaces
// `values`, which are only written.
void quantised_unpack_add(float* values, const QuantisedLayout& layout, const std::vector<const std::uint8_t*>& messages,
                          const std::vector<float>& weights, bool replaces);

}  // namespace topkube
