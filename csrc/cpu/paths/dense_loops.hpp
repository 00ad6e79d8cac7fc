// The loops of dense kernels. The compiler vectorises them. Lane-wise arithmetic has the same bits at any vector width.
// `widen_add` leaves NaNs as they are, because `narrow`, which always follows, makes them canonical.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.hpp"
#include "cpu/paths/lanes.hpp"

namespace topkube {
namespace {

constexpr std::size_t dense_part = 128;  // elements that a loop processes after it has loaded others into the cache

// Loads a part of an array into the cache, four parts ahead. Behind the end of the array, the processor ignores it.
template <class T>
void prefetch_part(const T* part) {
  for (std::size_t line = 0; line < dense_part * sizeof(T); line += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(part + 4 * dense_part) + line);
  }
}

template <class T>
void widen(float* out, const void* input, std::size_t length) {
  const auto* in = static_cast<const typename T::Item*>(input);
  for (std::size_t i = 0; i < length; ++i) out[i] = T::load(in[i]);
}

template <class T>
void widen_add(float* out, const void* input, std::size_t length) {
  const auto* in = static_cast<const typename T::Item*>(input);
  for (std::size_t i = 0; i < length; ++i) out[i] += T::load(in[i]);
}

template <class T>
void narrow(void* out, const float* input, std::size_t length, float scale) {
  auto* to = static_cast<typename T::Item*>(out);
  for (std::size_t i = 0; i < length; ++i) to[i] = T::round(canonical(input[i] * scale));
}

void add_f32(float* out, const float* a, const float* b, std::size_t length, float scale) {
  std::size_t start = 0;
  for (; start + dense_part <= length; start += dense_part) {
    prefetch_part(a + start);
    prefetch_part(b + start);
#pragma GCC ivdep
    for (std::size_t i = start; i < start + dense_part; ++i) out[i] = canonical((a[i] + b[i]) * scale);
  }
#pragma GCC ivdep
  for (std::size_t i = start; i < length; ++i) out[i] = canonical((a[i] + b[i]) * scale);
}

#if defined(__F16C__)
// The compiler does not vectorise fp16. The processor's own conversions round, and treat NaN, in the same way as dtype.hpp.
template <>
void widen<F16>(float* out, const void* input, std::size_t length) {
  const auto* in = static_cast<const std::uint16_t*>(input);
  std::size_t i = 0;
  for (; i + 8 <= length; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  for (; i < length; ++i) out[i] = from_f16(in[i]);
}

template <>
void widen_add<F16>(float* out, const void* input, std::size_t length) {
  const auto* in = static_cast<const std::uint16_t*>(input);
  std::size_t i = 0;
  for (; i + 8 <= length; i += 8) {
    const __m256 widened = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
    _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(out + i), widened));
  }
  for (; i < length; ++i) out[i] += from_f16(in[i]);
}

template <>
void narrow<F16>(void* out, const float* input, std::size_t length, float scale) {
  auto* to = static_cast<std::uint16_t*>(out);
  std::size_t i = 0;
  for (; i + 8 <= length; i += 8) {
    const __m256 product = _mm256_mul_ps(_mm256_loadu_ps(input + i), _mm256_set1_ps(scale));
    const __m256 is_nan = _mm256_cmp_ps(product, product, _CMP_UNORD_Q);
    const __m256 scaled = _mm256_blendv_ps(product, _mm256_set1_ps(float_of(canonical_nan)), is_nan);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < length; ++i) to[i] = to_f16(canonical(input[i] * scale));
}
#endif

template <class T>
void low_rank_row(void* out, float* residual, const float* left, const float* right, std::size_t columns, std::size_t rank,
                  float weight) {
  constexpr std::size_t part = 512;  // the sums stay in the first-level cache
  alignas(64) float sums[part];
  auto* to = static_cast<typename T::Item*>(out);
  for (std::size_t start = 0; start < columns; start += part) {
    const std::size_t length = part < columns - start ? part : columns - start;
    for (std::size_t i = 0; i < length; ++i) sums[i] = 0.0f + left[0] * right[start + i];
    for (std::size_t column = 1; column < rank; ++column) {
      const float* factor = right + column * columns + start;
      for (std::size_t i = 0; i < length; ++i) sums[i] += left[column] * factor[i];
    }
    narrow<T>(to + start, sums, length, 1.0f);
    widen<T>(sums, to + start, length);
    float* rest = residual + start;
    for (std::size_t i = 0; i < length; ++i) rest[i] = canonical(rest[i] - weight * sums[i]);
  }
}

template <class Bits, Bits infinity>
bool is_finite(const void* data, std::size_t length) {
  const auto* in = static_cast<const Bits*>(data);
  constexpr std::size_t block = 4096;  // stops early if a gradient has overflowed, without a branch per element
  for (std::size_t start = 0; start < length; start += block) {
    const std::size_t end = start + block < length ? start + block : length;
    Bits nonfinite = 0;
    std::size_t i = start;
    for (; i + dense_part <= end; i += dense_part) {
      prefetch_part(in + i);
      for (std::size_t j = i; j < i + dense_part; ++j) nonfinite |= static_cast<Bits>((in[j] & infinity) == infinity);
    }
    for (; i < end; ++i) nonfinite |= static_cast<Bits>((in[i] & infinity) == infinity);
    if (nonfinite) return false;
  }
  return true;
}

}  // namespace
}  // namespace topkube
