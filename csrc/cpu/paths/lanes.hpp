// The vector instructions that selection needs, in one small class per path. `Lanes` is the class for the path of this unit.
//
// The AVX-512 class is also tested on processors without AVX-512: tests/unit/kernels/test_kernels_emulated.py compiles it against
// SIMDe, which implements each intrinsic in plain C, and compares every kernel with the portable path.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.hpp"

#if defined(TOPKUBE_EMULATE_AVX512)
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#elif defined(__SSE2__)
#include <immintrin.h>
#endif

namespace topkube {
namespace {

// `add` returns canonical NaNs (cpu/dtype.hpp). A mask has one entry per lane. `compare_at_least` returns a mask; `clear_lanes`
// sets the lanes of a mask to zero. `pack_masks` combines the masks of 64 elements into one word, with bit i for element i;
// `mask_at(j)` returns the mask of the lanes from j on. `store_selected` writes the lanes whose bit is set, in their order, and then
// up to `width` lanes of any contents; `bits` has `width` bits.
#if defined(__AVX512F__) || defined(TOPKUBE_EMULATE_AVX512)

struct Lanes {
  static constexpr std::size_t width = 16;
  using Vector = __m512i;
  using Mask = __mmask16;

  static Vector broadcast(std::uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
  static Vector load(const void* from) { return _mm512_loadu_si512(from); }
  static Vector load_16_bits(const std::uint16_t* from) {  // in halves: SIMDe 0.7 lacks the widening of a whole vector
    const auto* at = reinterpret_cast<const __m128i*>(from);
    return join(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1)));
  }
  static void store(void* to, Vector v) { _mm512_storeu_si512(to, v); }
  static Vector bitwise_and(Vector a, Vector b) { return _mm512_and_si512(a, b); }
  static Vector shift_left_16(Vector v) { return _mm512_slli_epi32(v, 16); }
  static Vector load_fp16(const std::uint16_t* from) {
    const auto* at = reinterpret_cast<const __m128i*>(from);
    return join(_mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128(at))),
                _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128(at + 1))));
  }
  static Vector add(Vector a, Vector b) {
    const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b));
    const Mask is_nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(_mm512_castps_si512(sum), is_nan, broadcast(canonical_nan));
  }
  static Mask compare_at_least(Vector magnitude, Vector threshold) { return _mm512_cmpge_epu32_mask(magnitude, threshold); }
  template <class MaskAt>
  static std::uint64_t pack_masks(const MaskAt& mask_at) {
    return std::uint64_t{mask_at(0)} | std::uint64_t{mask_at(16)} << 16 | std::uint64_t{mask_at(32)} << 32 |
           std::uint64_t{mask_at(48)} << 48;
  }
  static Vector clear_lanes(Mask mask, Vector v) { return _mm512_maskz_mov_epi32(static_cast<Mask>(~mask), v); }
  static Vector count_up(std::uint32_t from) {
    return _mm512_add_epi32(broadcast(from), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  static void store_selected(void* to, std::uint32_t bits, Vector v) {
    store(to, _mm512_maskz_compress_epi32(static_cast<Mask>(bits), v));
  }

 private:
  static Vector join(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
};

#elif defined(__AVX2__)

struct Lanes {
  static constexpr std::size_t width = 8;
  using Vector = __m256i;
  using Mask = __m256i;

  static Vector broadcast(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
  static Vector load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  static Vector load_16_bits(const std::uint16_t* from) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store(void* to, Vector v) { _mm256_storeu_si256(static_cast<__m256i*>(to), v); }
  static Vector bitwise_and(Vector a, Vector b) { return _mm256_and_si256(a, b); }
  static Vector shift_left_16(Vector v) { return _mm256_slli_epi32(v, 16); }
  static Vector load_fp16(const std::uint16_t* from) {
    return _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  static Vector add(Vector a, Vector b) {
    const __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
    const __m256 is_nan = _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q);
    return _mm256_blendv_epi8(_mm256_castps_si256(sum), broadcast(canonical_nan), _mm256_castps_si256(is_nan));
  }
  // Magnitudes are below 2^31 and thresholds at most 2^31, so a signed comparison with threshold - 1 is correct.
  static Mask compare_at_least(Vector magnitude, Vector threshold) {
    return _mm256_cmpgt_epi32(magnitude, _mm256_sub_epi32(threshold, _mm256_set1_epi32(1)));
  }
  // Packs the masks to bytes first: this needs two moves out of vector registers instead of eight.
  template <class MaskAt>
  static std::uint64_t pack_masks(const MaskAt& mask_at) {
    const auto half = [&](std::size_t j) {
      const Vector low = _mm256_packs_epi32(mask_at(j), mask_at(j + 8)),
                   high = _mm256_packs_epi32(mask_at(j + 16), mask_at(j + 24));
      const Vector bytes = _mm256_packs_epi16(low, high);  // each half of the vector is packed separately, in groups of four
      const Vector in_order = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      return std::uint64_t{static_cast<unsigned>(_mm256_movemask_epi8(in_order))};
    };
    const std::uint64_t low = half(0);
    return low | half(32) << 32;
  }
  static Vector clear_lanes(Mask mask, Vector v) { return _mm256_andnot_si256(mask, v); }
  static Vector count_up(std::uint32_t from) {
    return _mm256_add_epi32(broadcast(from), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static void store_selected(void* to, std::uint32_t bits, Vector v) {
    const __m128i order = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(selected_lanes.lanes[bits]));
    store(to, _mm256_permutevar8x32_epi32(v, _mm256_cvtepu8_epi32(order)));
  }

 private:
  // For each mask of eight bits: the places of the bits that are set, in ascending order.
  struct SelectedLanes {
    constexpr SelectedLanes() : lanes{} {
      for (unsigned bits = 0; bits < 256; ++bits) {
        unsigned count = 0;
        for (unsigned lane = 0; lane < 8; ++lane) {
          if (bits >> lane & 1u) lanes[bits][count++] = static_cast<std::uint8_t>(lane);
        }
      }
    }
    std::uint8_t lanes[256][8];
  };
  static const SelectedLanes selected_lanes;
};
constexpr Lanes::SelectedLanes Lanes::selected_lanes{};

#else

struct Lanes {
  static constexpr std::size_t width = 4;
  typedef std::uint32_t Vector __attribute__((vector_size(16)));
  typedef std::int32_t Mask __attribute__((vector_size(16)));
  typedef float Floats __attribute__((vector_size(16)));

  static Vector broadcast(std::uint32_t value) { return Vector{value, value, value, value}; }
  static Vector load(const void* from) {
    Vector v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
  }
  static Vector load_16_bits(const std::uint16_t* from) { return Vector{from[0], from[1], from[2], from[3]}; }
  static void store(void* to, Vector v) { __builtin_memcpy(to, &v, sizeof v); }
  static Vector bitwise_and(Vector a, Vector b) { return a & b; }
  static Vector shift_left_16(Vector v) { return v << 16; }
  static Vector load_fp16(const std::uint16_t* from) {
    return Vector{bits_of(from_f16(from[0])), bits_of(from_f16(from[1])), bits_of(from_f16(from[2])), bits_of(from_f16(from[3]))};
  }
  static Vector add(Vector a, Vector b) {
    const Floats sum = (Floats)a + (Floats)b;
    const auto is_nan = (Vector)(sum != sum);
    return ((Vector)sum & ~is_nan) | (broadcast(canonical_nan) & is_nan);
  }
  // Magnitudes are below 2^31 and thresholds at most 2^31, so a signed comparison with threshold - 1 is correct.
  static Mask compare_at_least(Vector magnitude, Vector threshold) { return (Mask)magnitude > (Mask)(threshold - 1); }
  template <class MaskAt>
  static std::uint64_t pack_masks(const MaskAt& mask_at) {
    std::uint64_t bits = 0;
    for (std::size_t j = 0; j < 64; j += width) bits |= std::uint64_t{pack_four(mask_at(j))} << j;
    return bits;
  }
  static Vector clear_lanes(Mask mask, Vector v) { return v & ~(Vector)mask; }
  static Vector count_up(std::uint32_t from) { return Vector{from, from + 1, from + 2, from + 3}; }
  static void store_selected(void* to, std::uint32_t bits, Vector v) {
    auto* words = static_cast<std::uint32_t*>(to);
    for (int lane = 0; lane < 4; ++lane) {
      *words = v[lane];
      words += bits >> lane & 1u;
    }
  }

 private:
  static unsigned pack_four(Mask mask) {
#if defined(__SSE2__)
    return static_cast<unsigned>(_mm_movemask_ps((__m128)mask));
#else
    return (mask[0] & 1u) | (mask[1] & 2u) | (mask[2] & 4u) | (mask[3] & 8u);
#endif
  }
};

#endif

}  // namespace
}  // namespace topkube
