// The messages of the algorithm `topk1bit`: one bit for each of the largest elements of an array.
//
// A message has two parts. The signs: the scales and bits of cpu/sign/sign.hpp, for the chosen elements in the order of their
// indices, with zeros up to a multiple of 8 bytes. The indices, in the code of Elias and Fano: first `low` bit planes, one bit per
// index and (count + 7) / 8 bytes each, from the lowest bit on; then, in unary, the higher bits of all indices: for index number i,
// bit (index >> low) + i is set. Zeros follow up to a multiple of 8 bytes. Bit i of a plane, and of the unary part, is bit
// 7 - i % 8 of byte i / 8. Elias, "Efficient storage and retrieval by content and address of static files", 1974.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/sign/layout.hpp"

namespace topkube {

// Chooses the `layout.count` largest elements of `values` (as `topk` does), writes a message about them, `layout.bytes` long, and
// subtracts from each of these elements what is sent of it. Returns true if all scales are finite.
bool top_sign_pack(float* values, const TopSignLayout& layout, int threads, std::uint8_t* message);

// Adds the elements of a message, times `weight`, to `values`. Returns false, and changes nothing, if the message does not contain
// `layout.count` ascending indices below `layout.length`.
bool top_sign_unpack_add(float* values, const TopSignLayout& layout, const std::uint8_t* message, float weight);

}  // namespace topkube
