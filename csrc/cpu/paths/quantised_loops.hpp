// The loops of values with 4 or 8 bits. The compiler vectorises them. They process whole blocks: the rest of a short block is
// zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.hpp"
#include "cpu/quantised/squares.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace topkube {
namespace {

constexpr std::size_t block = 256;
// 1.5 * 2^23. The low bits of x + rounding_term are x, rounded to an integer.
constexpr float rounding_term = 12582912.0f;

// Writes the integer of each element, and subtracts the integer times the scale.
void quantise_to_multiples(float* values, std::size_t length, float scale, float inverse, std::uint8_t* integers) {
  for (std::size_t i = 0; i < length; ++i) {
    const float sum = values[i] * inverse + rounding_term;
    integers[i] = static_cast<std::uint8_t>(bits_of(sum));
    values[i] -= (sum - rounding_term) * scale;
  }
}

// Writes the integer of each element, and subtracts the square of the integer, with its sign, times the scale.
void quantise_to_squares(float* values, std::size_t length, float scale, float inverse, std::uint8_t* integers) {
  for (std::size_t i = 0; i < length; ++i) {
    const float x = values[i], magnitude = float_of(bits_of(x) & magnitude_bits) * inverse;
    float root = 0;  // how many limits between two squares lie below the magnitude
    for (int r = 0; r < largest_root; ++r) root += magnitude > limit_above_square(r) ? 1.0f : 0.0f;
    root = float_of(bits_of(root) | (bits_of(x) & ~magnitude_bits));
    integers[i] = static_cast<std::uint8_t>(bits_of(root + rounding_term));
    values[i] = x - signed_square(root) * scale;
  }
}

std::uint16_t quantised_pack(float* values, std::size_t length, int bits, std::uint8_t* codes) {
  std::int32_t largest = 0;  // the order of magnitudes is the order of their bits
  for (std::size_t i = 0; i < length; ++i) {
    const auto magnitude = static_cast<std::int32_t>(bits_of(values[i]) & magnitude_bits);
    largest = magnitude > largest ? magnitude : largest;
  }
  const float step = float_of(static_cast<std::uint32_t>(largest)) / (bits == 8 ? 127.0f : 49.0f);
  const std::uint32_t rounded_up = (bits_of(step) + 0xffffu) & 0xffff0000u;
  const bool is_finite = largest < static_cast<std::int32_t>(infinity_bits), is_small = rounded_up < smallest_normal_bits;
  const float scale = float_of(!is_finite ? canonical_nan : is_small ? 0u : rounded_up);
  const float inverse = is_finite && !is_small ? 1.0f / scale : 0.0f;
  std::uint8_t integers[block] = {};
  if (bits == 8) {
    quantise_to_multiples(values, length, scale, inverse, integers);
  } else {
    quantise_to_squares(values, length, scale, inverse, integers);
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

// Writes the signed squares of the roots in a block of codes with 4 bits. `length` is rounded up to a multiple of 32.
void read_squares(const std::uint8_t* codes, std::size_t length, std::int8_t* squares) {
#if defined(__AVX2__)
  // From 8 on, the bytes are 256 - the square. One instruction looks 16 integers up in this table.
  const __m128i table = _mm_setr_epi8(0, 1, 4, 9, 16, 25, 36, 49, -64, -49, -36, -25, -16, -9, -4, -1);
  const __m128i low_half = _mm_set1_epi8(15);
  for (std::size_t i = 0; i < length; i += 32) {
    const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2));
    const __m128i low = _mm_and_si128(pairs, low_half), high = _mm_and_si128(_mm_srli_epi16(pairs, 4), low_half);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(squares + i), _mm_shuffle_epi8(table, low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(squares + i + 16), _mm_shuffle_epi8(table, high));
  }
#else
  std::int16_t roots[block] = {};  // 16 bits, because old processors multiply such integers fastest
  for (std::size_t i = 0; i < length; i += 32) {
    for (std::size_t j = 0; j < 16; ++j) roots[i + j] = static_cast<std::int16_t>(codes[i / 2 + j] << 12) >> 12;
    for (std::size_t j = 0; j < 16; ++j) roots[i + 16 + j] = static_cast<std::int16_t>(codes[i / 2 + j] << 8) >> 12;
  }
  for (std::size_t i = 0; i < block; ++i) {
    const std::int16_t negative = roots[i] >> 15, magnitude = (roots[i] ^ negative) - negative;
    squares[i] = static_cast<std::int8_t>(roots[i] * magnitude);
  }
#endif
}

void quantised_unpack_add(float* values, std::size_t length, int bits, const float* scales, const std::uint8_t* const* codes,
                          std::size_t messages) {
  alignas(64) float sums[block] = {};
  alignas(64) std::int8_t squares[block];
  for (std::size_t m = 0; m < messages; ++m) {
    const float scale = scales[m];
    if (bits == 4) read_squares(codes[m], length, squares);
    const auto* integers = bits == 4 ? squares : reinterpret_cast<const std::int8_t*>(codes[m]);
    for (std::size_t i = 0; i < length; ++i) sums[i] += static_cast<float>(integers[i]) * scale;
  }
  for (std::size_t i = 0; i < length; ++i) values[i] = canonical(values[i] + sums[i]);
}

}  // namespace
}  // namespace topkube
