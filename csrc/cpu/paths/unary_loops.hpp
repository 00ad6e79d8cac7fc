// The loop of the code of Elias and Fano: a stream of bits, of which element i sets the bit at the place (indices[i] >> low) + i.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace topkube {
namespace {

constexpr std::size_t unary_lanes = 8;

#if defined(__AVX2__)

// Returns a word whose highest bit has the place 0, with the bits of four indices, of which the first has the place
// (from[0] >> low) + offset. A bit outside of the word is left out: its shift is at least 64, which results in 0.
__m256i mark_four(const std::uint32_t* from, unsigned low, std::size_t offset) {
  const __m256i wide = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i high = _mm256_srl_epi64(wide, _mm_cvtsi32_si128(static_cast<int>(low)));
  const __m256i shift_of_zero =
      _mm256_sub_epi64(_mm256_setr_epi64x(63, 62, 61, 60), _mm256_set1_epi64x(static_cast<long long>(offset)));
  return _mm256_sllv_epi64(_mm256_set1_epi64x(1), _mm256_sub_epi64(shift_of_zero, high));
}

std::uint64_t mark_lanes(const std::uint32_t* from, unsigned low, std::size_t offset) {
  const __m256i both = _mm256_or_si256(mark_four(from, low, offset), mark_four(from + 4, low, offset + 4));
  const __m128i two = _mm_or_si128(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  const __m128i one = _mm_or_si128(two, _mm_unpackhi_epi64(two, two));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(one));
}

#else

std::uint64_t mark_lanes(const std::uint32_t* from, unsigned low, std::size_t offset) {
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < unary_lanes; ++i) {
    const std::size_t shift = 63 - ((from[i] >> low) + offset + i);
    if (shift < 64) word |= std::uint64_t{1} << shift;
  }
  return word;
}

#endif

// Sets the bits of `count` ascending indices. `word` has the bits of the stream from some place on, the first in its highest bit, and
// `offset` is the place of index 0 in it without the index's own part. Words that are full go to `out`. Returns the number of bytes
// that they take; `word` then follows them.
std::size_t write_unary(const std::uint32_t* indices, std::size_t count, unsigned low, std::size_t offset, std::uint64_t* word,
                        std::uint8_t* out) {
  std::uint64_t bits = *word;
  std::size_t written = 0;
  const auto store = [&] {
    const std::uint64_t first_byte_first = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? __builtin_bswap64(bits) : bits;
    __builtin_memcpy(out + written, &first_byte_first, sizeof bits);
    written += sizeof bits;
    offset -= 64;  // of 64 bits; it wraps around below 0, and so do the sums with it
    bits = 0;
  };
  std::size_t i = 0;
  for (; i + unary_lanes <= count; i += unary_lanes) {
    bits |= mark_lanes(indices + i, low, offset + i);
    const std::size_t last = (indices[i + unary_lanes - 1] >> low) + i + unary_lanes - 1;
    while (last + offset >= 64) {
      store();
      bits = mark_lanes(indices + i, low, offset + i);
    }
  }
  for (; i < count; ++i) {
    while ((indices[i] >> low) + i + offset >= 64) store();
    bits |= std::uint64_t{1} << (63 - ((indices[i] >> low) + i + offset));
  }
  *word = bits;
  return written;
}

}  // namespace
}  // namespace topkube
