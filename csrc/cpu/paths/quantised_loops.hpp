// The loops of integers of 4 or 8 bits. The compiler vectorises them. They process whole blocks: the rest of a short block is
// zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.hpp"

namespace topkube {
namespace {

constexpr std::size_t block = 256;
// 1.5 * 2^23. The low bits of x + rounding_term are x, rounded to an integer.
constexpr float rounding_term = 12582912.0f;

std::uint16_t quantised_pack(float* values, std::size_t length, int bits, std::uint8_t* codes) {
  std::int32_t largest = 0;  // the order of magnitudes is the order of their bits
  for (std::size_t i = 0; i < length; ++i) {
    const auto magnitude = static_cast<std::int32_t>(bits_of(values[i]) & magnitude_bits);
    largest = magnitude > largest ? magnitude : largest;
  }
  const float step = float_of(static_cast<std::uint32_t>(largest)) / (bits == 8 ? 127.0f : 7.0f);
  const std::uint32_t rounded_up = (bits_of(step) + 0xffffu) & 0xffff0000u;
  const bool is_finite = largest < static_cast<std::int32_t>(infinity_bits), is_small = rounded_up < smallest_normal_bits;
  const float scale = float_of(!is_finite ? canonical_nan : is_small ? 0u : rounded_up);
  const float inverse = is_finite && !is_small ? 1.0f / scale : 0.0f;
  std::uint8_t integers[block] = {};
  for (std::size_t i = 0; i < length; ++i) {
    const float sum = values[i] * inverse + rounding_term;
    integers[i] = static_cast<std::uint8_t>(bits_of(sum));
    values[i] -= (sum - rounding_term) * scale;
  }
  if (!is_finite) {  // only such a block can have NaNs
    for (std::size_t i = 0; i < length; ++i) values[i] = canonical(values[i]);
  }
  if (bits == 8) {
    __builtin_memcpy(codes, integers, length);
  } else {
    for (std::size_t i = 0; i < length; i += 32) {
      for (std::size_t j = 0; j < 16; ++j) {
        codes[i / 2 + j] = static_cast<std::uint8_t>((integers[i + j] & 15) | integers[i + 16 + j] << 4);
      }
    }
  }
  return static_cast<std::uint16_t>(bits_of(scale) >> 16);
}

void quantised_unpack_add(float* values, std::size_t length, int bits, const float* scales, const std::uint8_t* const* codes,
                          std::size_t messages) {
  alignas(64) float sums[block] = {};
  for (std::size_t m = 0; m < messages; ++m) {
    const float scale = scales[m];
    if (bits == 8) {
      const auto* integers = reinterpret_cast<const std::int8_t*>(codes[m]);
      for (std::size_t i = 0; i < length; ++i) sums[i] += static_cast<float>(integers[i]) * scale;
    } else {
      for (std::size_t i = 0; i < length; i += 32) {
        for (std::size_t j = 0; j < 16; ++j) {
          const auto byte = static_cast<std::int8_t>(codes[m][i / 2 + j]);
          sums[i + j] += static_cast<float>(static_cast<std::int8_t>(byte << 4) >> 4) * scale;
          sums[i + 16 + j] += static_cast<float>(byte >> 4) * scale;
        }
      }
    }
  }
  for (std::size_t i = 0; i < length; ++i) values[i] = canonical(values[i] + sums[i]);
}

}  // namespace
}  // namespace topkube
