// The loops of values with 3, 4 or 8 bits. The compiler vectorises them. They process whole blocks: the rest of a short block is
// zeros. With AVX-512, whole blocks have loops of their own, with 16 elements per instruction. (SIMDe 0.7, which emulates AVX-512 in
// a test, lacks these instructions: the emulation takes the loops of the compiler.)
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.hpp"
#include "cpu/paths/block_vectors.hpp"
#include "cpu/paths/lanes.hpp"
#include "cpu/paths/level_loops.hpp"
#include "cpu/quantised/squares.hpp"

namespace topkube {
namespace {

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

#if defined(__AVX512F__)
// Does what quantise_to_multiples does for a whole block.
void quantise_block_to_multiples(float* values, float scale, float inverse, std::uint8_t* codes) {
  const __m512 factor = _mm512_set1_ps(inverse), step = _mm512_set1_ps(scale), term = _mm512_set1_ps(rounding_term);
  for (std::size_t i = 0; i < block; i += 16) {
    prefetch_after_next_block(values + i);
    const __m512 x = _mm512_loadu_ps(values + i);
    const __m512 sum = _mm512_add_ps(_mm512_mul_ps(x, factor), term);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(bits_of_vector(sum)));
    _mm512_storeu_ps(values + i, _mm512_sub_ps(x, _mm512_mul_ps(_mm512_sub_ps(sum, term), step)));
  }
}

// The root of a magnitude m is the number of limits r * (r + 1) + 0.5 below it (limit_above_square). These limits are the doubled
// triangular numbers 0, 1, 3, 6, ... plus 0.5, so m is above a limit if m / 2 - 0.25, rounded up, is above the triangular number.
// Both operations are exact where the result is positive. The root is then an entry of a table, and so is its square.
constexpr std::int32_t count_triangular_below(std::int32_t n) {
  std::int32_t count = 0;
  for (std::int32_t r = 0; r < largest_root; ++r) count += n > r * (r + 1) / 2 ? 1 : 0;
  return count;
}

struct RootTable {
  alignas(64) std::int32_t roots[32];
  alignas(64) float squares[32];

  constexpr RootTable() : roots(), squares() {
    for (std::int32_t n = 0; n < 32; ++n) {
      roots[n] = count_triangular_below(n);
      squares[n] = static_cast<float>(roots[n] * roots[n]);
    }
  }
};
constexpr RootTable root_table;

// Returns the signed roots of 16 values as integers, and subtracts the squares times the scale.
__m512i take_squares(float* values, __m512 factor, __m512 step) {
  const __m512i roots_low = _mm512_load_si512(root_table.roots), roots_high = _mm512_load_si512(root_table.roots + 16);
  const __m512 squares_low = _mm512_load_ps(root_table.squares), squares_high = _mm512_load_ps(root_table.squares + 16);
  const __m512i sign_bit = _mm512_set1_epi32(static_cast<std::int32_t>(~magnitude_bits));
  prefetch_after_next_block(values);
  const __m512 x = _mm512_loadu_ps(values);
  const __m512i sign = _mm512_and_si512(bits_of_vector(x), sign_bit);
  const __m512 magnitude = _mm512_mul_ps(floats_of_vector(_mm512_xor_si512(bits_of_vector(x), sign)), factor);
  const __m512 half = _mm512_sub_ps(_mm512_mul_ps(magnitude, _mm512_set1_ps(0.5f)), _mm512_set1_ps(0.25f));
  // A NaN, of a block that is not finite, becomes the entry 0, as do magnitudes up to 0.5.
  const __m512i entry = _mm512_cvt_roundps_epi32(half, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  const __m512i root = _mm512_permutex2var_epi32(roots_low, entry, roots_high);
  const __m512i square = bits_of_vector(_mm512_permutex2var_ps(squares_low, entry, squares_high));
  const __m512 signed_squares = floats_of_vector(_mm512_or_si512(square, sign));
  _mm512_storeu_ps(values, _mm512_sub_ps(x, _mm512_mul_ps(signed_squares, step)));
  const __m512i minus = _mm512_srai_epi32(sign, 31);
  return _mm512_sub_epi32(_mm512_xor_si512(root, minus), minus);
}

// Does what quantise_to_squares does for a whole block, and writes the codes.
void quantise_block_to_squares(float* values, float scale, float inverse, std::uint8_t* codes) {
  const __m512 factor = _mm512_set1_ps(inverse), step = _mm512_set1_ps(scale);
  for (std::size_t i = 0; i < block; i += 32) {
    const __m512i low = _mm512_and_si512(take_squares(values + i, factor, step), _mm512_set1_epi32(15));
    const __m512i high = _mm512_slli_epi32(take_squares(values + i + 16, factor, step), 4);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i / 2), _mm512_cvtepi32_epi8(_mm512_or_si512(low, high)));
  }
}
#endif

// Writes the codes of a block with this scale, and subtracts what they stand for.
void quantise(float* values, std::size_t length, int bits, float scale, float inverse, std::uint8_t* codes) {
#if defined(__AVX512F__)
  if (length == block) {
    (bits == 8 ? quantise_block_to_multiples : quantise_block_to_squares)(values, scale, inverse, codes);
    return;
  }
#endif
  std::uint8_t integers[block] = {};
  if (bits == 8) {
    quantise_to_multiples(values, length, scale, inverse, integers);
    __builtin_memcpy(codes, integers, length);
    return;
  }
  quantise_to_squares(values, length, scale, inverse, integers);
  for (std::size_t i = 0; i < length; i += 32) {
    for (std::size_t j = 0; j < 16; ++j) {
      codes[i / 2 + j] = static_cast<std::uint8_t>((integers[i + j] & 15) | integers[i + 16 + j] << 4);
    }
  }
}

QuantisedScale quantised_scale(const float* values, std::size_t length, int bits) {
  const float largest = find_largest(values, length);
  const float step = largest / (bits == 8 ? 127.0f : bits == 4 ? 49.0f : level_bound);
  const std::uint32_t rounded_up = (bits_of(step) + 0xffffu) & 0xffff0000u;
  const bool is_finite = bits_of(largest) < infinity_bits;
  const bool is_small = rounded_up < (bits == 3 ? bits_of(smallest_level_scale) : smallest_normal_bits);
  const float scale = float_of(!is_finite ? canonical_nan : is_small ? 0u : rounded_up);
  return {scale, is_finite && !is_small ? 1.0f / scale : 0.0f};
}

void quantised_pack(float* values, std::size_t length, int bits, QuantisedScale scale, std::uint8_t* codes) {
  if (bits == 3) {
    quantise_to_levels(values, length, scale.step, scale.inverse != 0, codes);
  } else {
    quantise(values, length, bits, scale.step, scale.inverse, codes);
  }
  if (scale.step != scale.step) {  // only a block that is not finite can have NaNs
    for (std::size_t i = 0; i < length; ++i) values[i] = canonical(values[i]);
  }
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

#if defined(__AVX512F__)
constexpr std::size_t most_tables = 16;

// Adds messages of a whole block with 8 bits to `sums`, which stay in registers for a part of the block.
void add_block_of_multiples(const float* scales, const std::uint8_t* const* codes, std::size_t messages, float* sums) {
  constexpr std::size_t part = 128;
  for (std::size_t start = 0; start < block; start += part) {
    __m512 total[part / 16];
    for (std::size_t k = 0; k < part / 16; ++k) total[k] = _mm512_load_ps(sums + start + 16 * k);
    for (std::size_t m = 0; m < messages; ++m) {
      const __m512 scale = _mm512_set1_ps(scales[m]);
      __builtin_prefetch(codes[m] + start + 2 * block);
      __builtin_prefetch(codes[m] + start + 2 * block + 64);
      for (std::size_t k = 0; k < part / 16; ++k) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes[m] + start + 16 * k));
        total[k] = _mm512_add_ps(total[k], _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale));
      }
    }
    for (std::size_t k = 0; k < part / 16; ++k) _mm512_store_ps(sums + start + 16 * k, total[k]);
  }
}

// Adds messages of a whole block with 4 bits to `sums`. A code is the entry of a table with all 16 products of the scale.
void add_block_of_squares(const float* scales, const std::uint8_t* const* codes, std::size_t messages, float* sums) {
  constexpr std::size_t part = 128;
  const __m512 squares = _mm512_setr_ps(0, 1, 4, 9, 16, 25, 36, 49, -64, -49, -36, -25, -16, -9, -4, -1);
  for (std::size_t first = 0; first < messages; first += most_tables) {
    const std::size_t count = messages - first < most_tables ? messages - first : most_tables;
    __m512 products[most_tables];
    for (std::size_t m = 0; m < count; ++m) products[m] = _mm512_mul_ps(squares, _mm512_set1_ps(scales[first + m]));
    for (std::size_t start = 0; start < block; start += part) {
      __m512 total[part / 16];
      for (std::size_t k = 0; k < part / 16; ++k) total[k] = _mm512_load_ps(sums + start + 16 * k);
      for (std::size_t m = 0; m < count; ++m) {
        __builtin_prefetch(codes[first + m] + start / 2 + block);
        for (std::size_t k = 0; k < part / 16; k += 2) {
          const std::uint8_t* pairs = codes[first + m] + (start + 16 * k) / 2;
          const __m512i entries = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs)));
          total[k] = _mm512_add_ps(total[k], _mm512_permutexvar_ps(entries, products[m]));  // its low 4 bits count
          total[k + 1] = _mm512_add_ps(total[k + 1], _mm512_permutexvar_ps(_mm512_srli_epi32(entries, 4), products[m]));
        }
      }
      for (std::size_t k = 0; k < part / 16; ++k) _mm512_store_ps(sums + start + 16 * k, total[k]);
    }
  }
}
#endif

void quantised_unpack_add(float* values, std::size_t length, int bits, const float* scales, const std::uint8_t* const* codes,
                          std::size_t messages) {
  alignas(64) float sums[block] = {};
  alignas(64) std::int8_t squares[block];
  if (bits == 3) {
    for (std::size_t m = 0; m < messages; ++m) add_levels(scales[m], codes[m], length, sums);
    messages = 0;
  }
#if defined(__AVX512F__)
  if (length == block && messages) {
    (bits == 8 ? add_block_of_multiples : add_block_of_squares)(scales, codes, messages, sums);
    messages = 0;
  }
#endif
  for (std::size_t m = 0; m < messages; ++m) {
    const float scale = scales[m];
    if (bits == 4) read_squares(codes[m], length, squares);
    const auto* integers = bits == 4 ? squares : reinterpret_cast<const std::int8_t*>(codes[m]);
    for (std::size_t i = 0; i < length; ++i) sums[i] += static_cast<float>(integers[i]) * scale;
  }
  for (std::size_t i = 0; i < length; i += 16) __builtin_prefetch(values + i + 2 * block);
  for (std::size_t i = 0; i < length; ++i) values[i] = canonical(values[i] + sums[i]);
}

}  // namespace
}  // namespace topkube
