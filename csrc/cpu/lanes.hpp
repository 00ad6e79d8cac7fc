// The vector instructions that selection needs, one small layer per path. `Lanes` is the one that this unit is compiled for.
//
// How the AVX-512 layer is verified where no processor has it: tests/unit/test_kernels_emulated.py compiles it against SIMDe,
// which spells each intrinsic out in plain C, and compares every kernel with the portable path.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.hpp"

#if defined(TOPKUBE_EMULATE_AVX512)
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

namespace topkube {
namespace {

#if defined(__AVX512F__) || defined(TOPKUBE_EMULATE_AVX512)

struct Lanes {
  static constexpr std::size_t width = 16;
  using Vector = __m512i;
  using Mask = __mmask16;

  static Vector set(std::uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
  static Vector load(const void* from) { return _mm512_loadu_si512(from); }
  static Vector load16(const std::uint16_t* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void store(void* to, Vector v) { _mm512_storeu_si512(to, v); }
  static Vector both(Vector a, Vector b) { return _mm512_and_si512(a, b); }
  static Vector shift16(Vector v) { return _mm512_slli_epi32(v, 16); }
  static Vector from_half(const std::uint16_t* from) {
    const auto* at = reinterpret_cast<const __m128i*>(from);
    const __m256i low = _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128(at)));
    const __m256i high = _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128(at + 1)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  static Vector add(Vector a, Vector b) {
    return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
  }
  static Mask at_least(Vector magnitude, Vector threshold) { return _mm512_cmpge_epu32_mask(magnitude, threshold); }
  static Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
  static bool any(Mask mask) { return mask != 0; }
  // Compressing in a register and storing the whole of it: the store with a mask takes over 100 cycles on AMD.
  static std::size_t append(std::uint32_t* indices, std::uint32_t* values, std::uint32_t base, Vector v, Mask mask) {
    const Vector lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    store(indices, _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(set(base), lane)));
    store(values, _mm512_maskz_compress_epi32(mask, v));
    return static_cast<std::size_t>(__builtin_popcount(mask));
  }
};

#elif defined(__AVX2__)

struct Compaction {
  // Row m lists the lanes whose bit is set in m, in order.
  std::uint8_t lanes[256][8];
  constexpr Compaction() : lanes{} {
    for (int mask = 0; mask < 256; ++mask) {
      int to = 0;
      for (int lane = 0; lane < 8; ++lane) {
        if (mask >> lane & 1) lanes[mask][to++] = static_cast<std::uint8_t>(lane);
      }
    }
  }
};
constexpr Compaction compaction;

struct Lanes {
  static constexpr std::size_t width = 8;
  using Vector = __m256i;
  using Mask = __m256i;

  static Vector set(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
  static Vector load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  static Vector load16(const std::uint16_t* from) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store(void* to, Vector v) { _mm256_storeu_si256(static_cast<__m256i*>(to), v); }
  static Vector both(Vector a, Vector b) { return _mm256_and_si256(a, b); }
  static Vector shift16(Vector v) { return _mm256_slli_epi32(v, 16); }
  static Vector from_half(const std::uint16_t* from) {
    return _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  static Vector add(Vector a, Vector b) {
    return _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)));
  }
  // Both are below 2^31 + 1, so "greater than threshold - 1" may compare as signed.
  static Mask at_least(Vector magnitude, Vector threshold) {
    return _mm256_cmpgt_epi32(magnitude, _mm256_sub_epi32(threshold, _mm256_set1_epi32(1)));
  }
  static Mask either(Mask a, Mask b) { return _mm256_or_si256(a, b); }
  static bool any(Mask mask) { return !_mm256_testz_si256(mask, mask); }
  static std::size_t append(std::uint32_t* indices, std::uint32_t* values, std::uint32_t base, Vector v, Mask mask) {
    const auto bits = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
    const __m128i row = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(compaction.lanes[bits]));
    const Vector order = _mm256_cvtepu8_epi32(row);
    store(indices, _mm256_add_epi32(set(base), order));
    store(values, _mm256_permutevar8x32_epi32(v, order));
    return static_cast<std::size_t>(__builtin_popcount(bits));
  }
};

#else

struct Lanes {
  static constexpr std::size_t width = 4;
  typedef std::uint32_t Vector __attribute__((vector_size(16)));
  typedef std::int32_t Mask __attribute__((vector_size(16)));
  typedef float Floats __attribute__((vector_size(16)));
  typedef std::uint64_t Halves __attribute__((vector_size(16)));

  static Vector set(std::uint32_t value) { return Vector{value, value, value, value}; }
  static Vector load(const void* from) {
    Vector v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
  }
  static Vector load16(const std::uint16_t* from) { return Vector{from[0], from[1], from[2], from[3]}; }
  static void store(void* to, Vector v) { __builtin_memcpy(to, &v, sizeof v); }
  static Vector both(Vector a, Vector b) { return a & b; }
  static Vector shift16(Vector v) { return v << 16; }
  static Vector from_half(const std::uint16_t* from) {
    return Vector{bits_of(from_f16(from[0])), bits_of(from_f16(from[1])), bits_of(from_f16(from[2])),
                  bits_of(from_f16(from[3]))};
  }
  static Vector add(Vector a, Vector b) { return (Vector)((Floats)a + (Floats)b); }
  // Both are below 2^31 + 1, so "greater than threshold - 1" may compare as signed.
  static Mask at_least(Vector magnitude, Vector threshold) { return (Mask)magnitude > (Mask)(threshold - 1); }
  static Mask either(Mask a, Mask b) { return a | b; }
  static bool any(Mask mask) {
    const Halves halves = (Halves)mask;
    return (halves[0] | halves[1]) != 0;
  }
  static std::size_t append(std::uint32_t* indices, std::uint32_t* values, std::uint32_t base, Vector v, Mask mask) {
    std::size_t count = 0;
    for (std::uint32_t lane = 0; lane < width; ++lane) {
      indices[count] = base + lane;
      values[count] = v[lane];
      count += mask[lane] & 1;
    }
    return count;
  }
};

#endif

}  // namespace
}  // namespace topkube
