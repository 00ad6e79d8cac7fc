// The loops of values with 3 bits: seven levels, in units of groups of 32 elements. AVX-512 and AVX2 have loops of their own for whole
// groups.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.hpp"
#include "cpu/paths/block_vectors.hpp"
#include "cpu/quantised/seven_levels.hpp"

namespace topkube {
namespace {

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

// Writes the planes of a group of `length` elements, and subtracts what is sent of them.
void quantise_group_to_levels(float* values, std::size_t length, float unit, std::uint32_t* planes) {
  const float first = limit_above_level(0) * unit, second = limit_above_level(1) * unit, third = limit_above_level(2) * unit;
  std::uint32_t codes[level_group] = {};
  for (std::size_t i = 0; i < length; ++i) {
    const float x = values[i], magnitude = float_of(bits_of(x) & magnitude_bits);
    const std::uint32_t sign = bits_of(x) & ~magnitude_bits;
    const float level = magnitude > third    ? level_of_magnitude(3)
                        : magnitude > second ? level_of_magnitude(2)
                        : magnitude > first  ? level_of_magnitude(1)
                                             : level_of_magnitude(0);
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
  __m512 level = _mm512_maskz_mov_ps(first, _mm512_set1_ps(level_of_magnitude(1)));
  level = _mm512_mask_mov_ps(level, second, _mm512_set1_ps(level_of_magnitude(2)));
  level = _mm512_mask_mov_ps(level, third, _mm512_set1_ps(level_of_magnitude(3)));
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
    __m256 level = _mm256_and_ps(first, _mm256_set1_ps(level_of_magnitude(1)));
    level = _mm256_blendv_ps(level, _mm256_set1_ps(level_of_magnitude(2)), second);
    level = _mm256_blendv_ps(level, _mm256_set1_ps(level_of_magnitude(3)), third);
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

}  // namespace
}  // namespace topkube
