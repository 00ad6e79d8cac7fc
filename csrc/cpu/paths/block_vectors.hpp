// What the loops of blocks of 256 elements share (quantised_loops.hpp, level_loops.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.hpp"
#include "cpu/paths/lanes.hpp"

namespace topkube {
namespace {

constexpr std::size_t block = 256;

// Returns the largest magnitude, which may be that of a NaN.
float find_largest(const float* values, std::size_t length) {
  std::int32_t largest = 0;  // the order of magnitudes is the order of their bits
  for (std::size_t i = 0; i < length; ++i) {
    const auto magnitude = static_cast<std::int32_t>(bits_of(values[i]) & magnitude_bits);
    largest = magnitude > largest ? magnitude : largest;
  }
  return float_of(static_cast<std::uint32_t>(largest));
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
#endif

}  // namespace
}  // namespace topkube
