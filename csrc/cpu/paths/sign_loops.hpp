// The loops of signs. They use the compiler's vectors, as wide as this path's registers. The compiler would keep wider vectors in
// memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.hpp"
#include "cpu/paths/lanes.hpp"

namespace topkube {
namespace {

#if defined(__AVX512F__) || defined(TOPKUBE_EMULATE_AVX512)
#define TOPKUBE_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define TOPKUBE_VECTOR_BYTES 32
#else
#define TOPKUBE_VECTOR_BYTES 16
#endif
constexpr std::uint32_t sign_bit = 0x80000000u;
constexpr std::size_t width = TOPKUBE_VECTOR_BYTES / 4;  // lanes of a vector
constexpr std::size_t vectors = 16 / width;              // vectors for sixteen elements
typedef float Floats32 __attribute__((vector_size(TOPKUBE_VECTOR_BYTES)));
typedef std::uint32_t Words32 __attribute__((vector_size(TOPKUBE_VECTOR_BYTES)));

// Elements between a prefetch and its use, two blocks. The hardware alone does not load lines while a block is in work.
constexpr std::size_t prefetched = 512;

// Returns the sign bits of 16 elements, with bit i for element i.
std::uint32_t signs_of(const float* values) {
#if defined(__AVX2__)
  const auto low = static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_loadu_ps(values)));
  return low | static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_loadu_ps(values + 8))) << 8;
#elif defined(__SSE2__)
  std::uint32_t signs = 0;
  for (int j = 0; j < 16; j += 4) signs |= static_cast<std::uint32_t>(_mm_movemask_ps(_mm_loadu_ps(values + j))) << j;
  return signs;
#else
  std::uint32_t signs = 0;
  for (int j = 0; j < 16; ++j) signs |= bits_of(values[j]) >> 31 << j;
  return signs;
#endif
}

// The scale comes from sixteen running sums of magnitudes: element i goes into sum i % 16. At the end, the second half of the sums
// is added to the first half, until one sum is left.
std::uint16_t sign_pack(float* values, std::size_t length, std::uint8_t* bits) {
  alignas(64) float sums[16] = {};
  const std::size_t whole = length / 16 * 16;
  Floats32 running[vectors] = {};
  for (std::size_t i = 0; i < whole; i += 16) {
    __builtin_prefetch(values + i + prefetched);
    for (std::size_t v = 0; v < vectors; ++v) {
      Words32 word;
      __builtin_memcpy(&word, values + i + v * width, sizeof word);
      running[v] += (Floats32)(word & magnitude_bits);
    }
    const std::uint32_t signs = signs_of(values + i);
    bits[i / 8] = static_cast<std::uint8_t>(signs);
    bits[i / 8 + 1] = static_cast<std::uint8_t>(signs >> 8);
  }
  __builtin_memcpy(sums, running, sizeof sums);
  for (std::size_t i = whole; i < length; ++i) {
    if (i % 8 == 0) bits[i / 8] = 0;
    bits[i / 8] = static_cast<std::uint8_t>(bits[i / 8] | (bits_of(values[i]) >> 31) << i % 8);
    sums[i - whole] += float_of(bits_of(values[i]) & magnitude_bits);
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  const float mean = sums[0] / static_cast<float>(length);
  const std::uint16_t scale = mean == mean ? to_bf16(mean) : std::uint16_t{0x7fc0};
  const std::uint32_t sent = std::uint32_t{scale} << 16;
  for (std::size_t i = 0; i < length; ++i) values[i] -= float_of(sent | (bits_of(values[i]) & sign_bit));
  if (!is_finite_bf16(scale)) {  // only such a block can have NaNs
    for (std::size_t i = 0; i < length; ++i) values[i] = canonical(values[i]);
  }
  return scale;
}

// The running sums of 32 elements. `add` adds what one part sends of them: +scale, or -scale if the element's bit is set. `add_to`
// adds the sums to the elements.
struct SignSums {
#if defined(__AVX512F__) || defined(TOPKUBE_EMULATE_AVX512)
  __m512 sums[2] = {};

  void add(float scale, std::uint32_t signs) {
    const __m512i plus = _mm512_castps_si512(_mm512_set1_ps(scale));
    const __m512i minus_zero = _mm512_set1_epi32(static_cast<int>(sign_bit));
    for (int j = 0; j < 2; ++j) {
      const __m512i sent = _mm512_mask_xor_epi32(plus, static_cast<__mmask16>(signs >> 16 * j), plus, minus_zero);
      sums[j] = _mm512_add_ps(sums[j], _mm512_castsi512_ps(sent));
    }
  }
  void add_to(float* values) const {
    for (int j = 0; j < 2; ++j) {
      Lanes::store(values + 16 * j, Lanes::add(Lanes::load(values + 16 * j), _mm512_castps_si512(sums[j])));
    }
  }
#elif defined(__AVX2__)
  __m256 sums[4] = {};

  void add(float scale, std::uint32_t signs) {
    const __m256 plus = _mm256_set1_ps(scale);
    const __m256i all = _mm256_set1_epi32(static_cast<int>(signs)), minus_zero = _mm256_set1_epi32(static_cast<int>(sign_bit));
    for (int j = 0; j < 4; ++j) {  // shifts each lane's bit to the place of its sign
      const __m256i shift = _mm256_sub_epi32(_mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24), _mm256_set1_epi32(8 * j));
      const __m256i sign = _mm256_and_si256(_mm256_sllv_epi32(all, shift), minus_zero);
      sums[j] = _mm256_add_ps(sums[j], _mm256_xor_ps(plus, _mm256_castsi256_ps(sign)));
    }
  }
  void add_to(float* values) const {
    for (int j = 0; j < 4; ++j) {
      Lanes::store(values + 8 * j, Lanes::add(Lanes::load(values + 8 * j), _mm256_castps_si256(sums[j])));
    }
  }
#else
  Floats32 sums[32 / width] = {};

  void add(float scale, std::uint32_t signs) {
    Words32 lane;  // the bit of each lane
    for (std::size_t j = 0; j < width; ++j) lane[j] = 1u << j;
    const Words32 plus = Words32{} + bits_of(scale);
    for (std::size_t v = 0; v < 32 / width; ++v) {
      const Words32 is_negative = (Words32)(((Words32{} + (signs >> v * width)) & lane) == lane);
      sums[v] += (Floats32)(plus ^ (is_negative & sign_bit));
    }
  }
  void add_to(float* values) const {
    for (std::size_t v = 0; v < 32 / width; ++v) {
      Floats32 value;
      __builtin_memcpy(&value, values + v * width, sizeof value);
      value += sums[v];
      const Words32 is_number = (Words32)(value == value);
      const Words32 sum = ((Words32)value & is_number) | (canonical_nan & ~is_number);
      __builtin_memcpy(values + v * width, &sum, sizeof sum);
    }
  }
#endif
};

void sign_unpack_add(float* values, std::size_t length, const float* scales, const std::uint8_t* const* bits, std::size_t parts) {
  std::size_t i = 0;
  for (; i + 32 <= length; i += 32) {
    __builtin_prefetch(values + i + prefetched);
    __builtin_prefetch(values + i + prefetched + 16);
    SignSums sums;
    for (std::size_t p = 0; p < parts; ++p) {
      std::uint32_t signs;
      __builtin_memcpy(&signs, bits[p] + i / 8, sizeof signs);
      sums.add(scales[p], signs);
    }
    sums.add_to(values + i);
  }
  for (; i < length; ++i) {
    float sum = 0;
    for (std::size_t p = 0; p < parts; ++p) {
      sum += float_of(bits_of(scales[p]) ^ (std::uint32_t{bits[p][i / 8]} >> i % 8 & 1u) << 31);
    }
    values[i] = canonical(values[i] + sum);
  }
}

}  // namespace
}  // namespace topkube
