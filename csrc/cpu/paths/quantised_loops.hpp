// The loops of values with 3, 4 or 8 bits. The compiler vectorises them. They process whole blocks: the rest of a short block is
// zeros. With AVX-512, whole blocks have loops of their own, with 16 elements per instruction. (SIMDe 0.7, which emulates AVX-512 in
// a test, lacks these instructions: the emulation takes the loops of the compiler.)
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.hpp"
#include "cpu/paths/lanes.hpp"
#include "cpu/quantised/seven_levels.hpp"
#include "cpu/quantised/squares.hpp"

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

#if defined(__AVX512F__)
// 16 values as vectors of bits and of floats.
__m512i bits_of_vector(__m512 x) { return _mm512_castps_si512(x); }
__m512 floats_of_vector(__m512i x) { return _mm512_castsi512_ps(x); }

// Loads the line two blocks ahead into the cache: the block after the next one, whose scale is computed next. Behind the end of the
// array, the processor ignores it.
void prefetch_after_next_block(const float* values) {
  _mm_prefetch(reinterpret_cast<const char*>(values + 2 * block), _MM_HINT_T0);
}

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

struct LevelTable {
  alignas(64) float fractions[last_exponent + 1];
  alignas(64) float levels[16];

  constexpr LevelTable() : fractions(), levels() {
    for (std::uint32_t e = 0; e <= last_exponent; ++e) fractions[e] = level_fraction(e);
    for (std::uint32_t code = 0; code < 16; ++code) levels[code] = level_of(code % 8);
  }
};
constexpr LevelTable level_table;

// Returns the exponent of a group whose largest magnitude is `largest`.
unsigned find_level_exponent(float largest, float scale) {
#if defined(__AVX512F__)
  const __m512 units = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_load_ps(level_table.fractions));
  const __m512 bounds = _mm512_mul_ps(units, _mm512_set1_ps(level_bound));
  const unsigned enough = _mm512_cmp_ps_mask(_mm512_set1_ps(largest), bounds, _CMP_LE_OQ);
  return 31u - static_cast<unsigned>(__builtin_clz(enough | 1u));
#else
  unsigned exponent = 0;
  for (std::uint32_t e = 1; e <= last_exponent; ++e) {
    exponent += largest <= scale * level_table.fractions[e] * level_bound ? 1u : 0u;
  }
  return exponent;
#endif
}

// Returns the largest magnitude, which may be that of a NaN.
float find_largest(const float* values, std::size_t length) {
  std::int32_t largest = 0;  // the order of magnitudes is the order of their bits
  for (std::size_t i = 0; i < length; ++i) {
    const auto magnitude = static_cast<std::int32_t>(bits_of(values[i]) & magnitude_bits);
    largest = magnitude > largest ? magnitude : largest;
  }
  return float_of(static_cast<std::uint32_t>(largest));
}

// Writes the planes of a group of `length` elements, and subtracts what is sent of them.
void quantise_group_to_levels(float* values, std::size_t length, float unit, std::uint32_t* planes) {
  const float first = limit_above_level(0) * unit, second = limit_above_level(1) * unit, third = limit_above_level(2) * unit;
  std::uint32_t codes[level_group] = {};
  for (std::size_t i = 0; i < length; ++i) {
    const float x = values[i], magnitude = float_of(bits_of(x) & magnitude_bits);
    const std::uint32_t sign = bits_of(x) & ~magnitude_bits;
    const float level = magnitude > third ? levels[3] : magnitude > second ? levels[2] : magnitude > first ? levels[1] : levels[0];
    const std::uint32_t above = (magnitude > first ? 1u : 0u) + (magnitude > second ? 1u : 0u) + (magnitude > third ? 1u : 0u);
    codes[i] = above | (above ? sign >> 29 : 0u);
    values[i] = x - float_of(bits_of(level) | sign) * unit;
  }
  for (unsigned p = 0; p < level_planes; ++p) {
    planes[p] = 0;
    for (unsigned i = 0; i < level_group; ++i) planes[p] |= (codes[i] >> p & 1u) << i;
  }
}

#if defined(__AVX512F__)
// 16 bits of each plane.
struct HalfPlanes {
  std::uint32_t low, high, sign;
};

// Returns the planes of 16 values, and subtracts what is sent of them.
HalfPlanes take_levels(float* values, __m512 x, __m512 magnitude, float unit) {
  const __m512 units = _mm512_set1_ps(unit);
  const __mmask16 first = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(limit_above_level(0) * unit), _CMP_GT_OQ);
  const __mmask16 second = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(limit_above_level(1) * unit), _CMP_GT_OQ);
  const __mmask16 third = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(limit_above_level(2) * unit), _CMP_GT_OQ);
  const __m512i sign_bit = _mm512_set1_epi32(static_cast<std::int32_t>(~magnitude_bits));
  const __mmask16 sign = _mm512_test_epi32_mask(bits_of_vector(x), sign_bit);
  __m512 level = _mm512_maskz_mov_ps(first, _mm512_set1_ps(levels[1]));
  level = _mm512_mask_mov_ps(level, second, _mm512_set1_ps(levels[2]));
  level = _mm512_mask_mov_ps(level, third, _mm512_set1_ps(levels[3]));
  level = floats_of_vector(_mm512_or_si512(bits_of_vector(level), _mm512_and_si512(bits_of_vector(x), sign_bit)));
  _mm512_storeu_ps(values, _mm512_sub_ps(x, _mm512_mul_ps(level, units)));
  return {(first & ~std::uint32_t{second}) | third, second, std::uint32_t{sign} & first};
}

// Does for a whole group what quantise_group_to_levels does. Returns the exponent of the group.
unsigned take_group(float* values, float scale, std::uint32_t* planes) {
  prefetch_after_next_block(values);
  prefetch_after_next_block(values + 16);
  const __m512i without_sign = _mm512_set1_epi32(static_cast<std::int32_t>(magnitude_bits));
  const __m512 x = _mm512_loadu_ps(values), y = _mm512_loadu_ps(values + 16);
  const __m512i x_magnitude = _mm512_and_si512(bits_of_vector(x), without_sign);
  const __m512i y_magnitude = _mm512_and_si512(bits_of_vector(y), without_sign);
  const std::uint32_t largest = _mm512_reduce_max_epu32(_mm512_max_epu32(x_magnitude, y_magnitude));
  const unsigned exponent = find_level_exponent(float_of(largest), scale);
  const float unit = scale * level_table.fractions[exponent];
  const HalfPlanes first = take_levels(values, x, floats_of_vector(x_magnitude), unit);
  const HalfPlanes second = take_levels(values + 16, y, floats_of_vector(y_magnitude), unit);
  planes[0] = first.low | second.low << 16;
  planes[1] = first.high | second.high << 16;
  planes[2] = first.sign | second.sign << 16;
  return exponent;
}
#elif defined(__AVX2__)
// Does for a whole group what quantise_group_to_levels does. Returns the exponent of the group.
unsigned take_group(float* values, float scale, std::uint32_t* planes) {
  const unsigned exponent = find_level_exponent(find_largest(values, level_group), scale);
  const float unit = scale * level_table.fractions[exponent];
  const __m256 minus_zero = _mm256_set1_ps(-0.0f), units = _mm256_set1_ps(unit);
  planes[0] = planes[1] = planes[2] = 0;
  for (std::size_t i = 0; i < level_group; i += 8) {
    const __m256 x = _mm256_loadu_ps(values + i), magnitude = _mm256_andnot_ps(minus_zero, x);
    const __m256 first = _mm256_cmp_ps(magnitude, _mm256_set1_ps(limit_above_level(0) * unit), _CMP_GT_OQ);
    const __m256 second = _mm256_cmp_ps(magnitude, _mm256_set1_ps(limit_above_level(1) * unit), _CMP_GT_OQ);
    const __m256 third = _mm256_cmp_ps(magnitude, _mm256_set1_ps(limit_above_level(2) * unit), _CMP_GT_OQ);
    __m256 level = _mm256_and_ps(first, _mm256_set1_ps(levels[1]));
    level = _mm256_blendv_ps(level, _mm256_set1_ps(levels[2]), second);
    level = _mm256_blendv_ps(level, _mm256_set1_ps(levels[3]), third);
    level = _mm256_or_ps(level, _mm256_and_ps(x, minus_zero));
    _mm256_storeu_ps(values + i, _mm256_sub_ps(x, _mm256_mul_ps(level, units)));
    const auto bits_of_mask = [](__m256 mask) { return static_cast<std::uint32_t>(_mm256_movemask_ps(mask)); };
    planes[0] |= ((bits_of_mask(first) & ~bits_of_mask(second)) | bits_of_mask(third)) << i;
    planes[1] |= bits_of_mask(second) << i;
    planes[2] |= (bits_of_mask(x) & bits_of_mask(first)) << i;
  }
  return exponent;
}
#endif

// Writes the exponents and the planes of a block with this scale, and subtracts what they stand for. Nothing is sent of a block
// whose scale is 0 or NaN.
void quantise_to_levels(float* values, std::size_t length, float scale, bool is_sent, std::uint8_t* codes) {
  const std::size_t groups = (length + level_group - 1) / level_group;
  std::uint8_t* to = codes + (groups + 1) / 2;
  __builtin_memset(codes, 0, static_cast<std::size_t>(to - codes));
  if (!is_sent) {
    __builtin_memset(to, 0, level_group_bytes * groups);
    for (std::size_t i = 0; i < length; ++i) values[i] -= 0.0f * scale;
    return;
  }
  for (std::size_t g = 0; g < groups; ++g, to += level_group_bytes) {
    float* group = values + g * level_group;
    const std::size_t rest = length - g * level_group, count = rest < level_group ? rest : level_group;
    std::uint32_t planes[level_planes];
    unsigned exponent;
#if defined(__AVX512F__) || defined(__AVX2__)
    if (count == level_group) {
      exponent = take_group(group, scale, planes);
    } else
#endif
    {
      exponent = find_level_exponent(find_largest(group, count), scale);
      quantise_group_to_levels(group, count, scale * level_table.fractions[exponent], planes);
    }
    codes[g / 2] = static_cast<std::uint8_t>(codes[g / 2] | exponent << g % 2 * 4);
    __builtin_memcpy(to, planes, sizeof planes);
  }
}

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

// Adds to `sums` what a message with 3 bits sends of a block. The last group may have fewer elements; zeros are added to the rest.
void add_levels(float scale, const std::uint8_t* codes, std::size_t length, float* sums) {
  const std::size_t groups = (length + level_group - 1) / level_group;
  const std::uint8_t* from = codes + (groups + 1) / 2;
  for (std::size_t g = 0; g < groups; ++g, from += level_group_bytes, sums += level_group) {
    const float unit = scale * level_table.fractions[codes[g / 2] >> g % 2 * 4 & 15];
    std::uint32_t planes[level_planes];
    __builtin_memcpy(planes, from, sizeof planes);
#if defined(__AVX512F__)
    for (unsigned half = 0; half < 2; ++half) {
      __m512i entries = _mm512_maskz_set1_epi32(static_cast<__mmask16>(planes[0] >> 16 * half), 1);
      for (unsigned p = 1; p < level_planes; ++p) {
        const auto plane = static_cast<__mmask16>(planes[p] >> 16 * half);
        entries = _mm512_mask_or_epi32(entries, plane, entries, _mm512_set1_epi32(1 << p));
      }
      const __m512 sent = _mm512_mul_ps(_mm512_permutexvar_ps(entries, _mm512_load_ps(level_table.levels)), _mm512_set1_ps(unit));
      _mm512_store_ps(sums + 16 * half, _mm512_add_ps(_mm512_load_ps(sums + 16 * half), sent));
    }
#elif defined(__AVX2__)
    const __m256i one = _mm256_set1_epi32(1), eight = _mm256_set1_epi32(8);
    __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (unsigned i = 0; i < level_group; i += 8, place = _mm256_add_epi32(place, eight)) {
      __m256i entries = _mm256_setzero_si256();
      for (unsigned p = level_planes; p-- > 0;) {
        const __m256i bits = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<std::int32_t>(planes[p])), place);
        entries = _mm256_or_si256(_mm256_slli_epi32(entries, 1), _mm256_and_si256(bits, one));
      }
      const __m256 level = _mm256_permutevar8x32_ps(_mm256_load_ps(level_table.levels), entries);
      _mm256_store_ps(sums + i, _mm256_add_ps(_mm256_load_ps(sums + i), _mm256_mul_ps(level, _mm256_set1_ps(unit))));
    }
#else
    for (unsigned i = 0; i < level_group; ++i) {
      const std::uint32_t code = (planes[0] >> i & 1u) | (planes[1] >> i & 1u) << 1 | (planes[2] >> i & 1u) << 2;
      sums[i] += level_table.levels[code] * unit;
    }
#endif
  }
}

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
