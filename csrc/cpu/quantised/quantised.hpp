// The messages of the algorithms `int3`, `int4` and `int8`: 3, 4 or 8 bits per element, and a scale per block of 256 elements.
//
// With 8 bits, an element is sent as the integer nearest to x / scale, times the scale. With 4 bits, it is sent as the nearest square
// of an integer from 0 to 7, with the sign of x, times the scale: squares are close to each other near zero, so elements that are
// small for their block lose less than they would with 15 evenly spaced values. The scale of a block is its largest |x| divided by
// L = 127 or 49, rounded up to a bf16 number. If the scale would be below 2^-126, it is 0, and nothing of the block is sent.
//
// With 3 bits, an element is sent as one of seven levels. So few have to suit a few neighbours rather than a whole block: each group
// of 32 elements has a unit of its own. The scale of a block is its largest |x| divided by 16, rounded up to a bf16 number; if it
// would be below 2^-118, it is 0. A group has an exponent e from 0 to 15, the largest one for which no |x| of the group is above 16
// times its unit, which is 2^(-e / 2) times the scale. An element is sent as the nearest of 0, 3, 8 and 14 units, the smaller if
// two are, with the sign of x. Zeros arrive as zeros.
//
// A message is the scales (bf16), then the integers with their signs (with 4 bits, the roots of the squares), both followed by zeros
// up to a multiple of 8 bytes. With 8 bits, element i has byte i. With 4 bits, 32 elements have 16 bytes: element j of the 32 has the low
// half of byte j, and element 16 + j its high half. Missing elements of the last 32 are zeros.
// With 3 bits, a block has the exponents of its groups, two in a byte, the first in the low half, and then 12 bytes for each group:
// three words of 32 bits with bit i for element i. The first two have the number of the level, from 0 to 3, and the last its sign.
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
