// The inner loops of every kernel, compiled once per path: TOPKUBE_PATH names it and CMake gives the instruction set.
//
// Nothing in this unit may leave it but the one table: it uses no function of the standard library that the linker could share
// with a unit for an older CPU.
#include "path_kernels.hpp"

#include "dtype.hpp"
#include "lanes.hpp"

#define TOPKUBE_TABLE_(path) path##_kernels
#define TOPKUBE_TABLE(path) TOPKUBE_TABLE_(path)
#define TOPKUBE_NAME_(path) #path
#define TOPKUBE_NAME(path) TOPKUBE_NAME_(path)

namespace topkube {
namespace {

// Dense. Plain loops: the compiler vectorises them, and lane-wise arithmetic has the same bits at any width.

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
  for (std::size_t i = 0; i < length; ++i) to[i] = T::round(input[i] * scale);
}

void add_f32(float* out, const float* a, const float* b, std::size_t length, float scale) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < length; ++i) out[i] = (a[i] + b[i]) * scale;
}

#if defined(__F16C__)
// The compiler does not vectorise fp16; the processor's own conversions round and treat NaN as dtype.hpp does.
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
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(input + i), _mm256_set1_ps(scale));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < length; ++i) to[i] = to_f16(input[i] * scale);
}
#endif

template <class Bits, Bits infinity>
bool is_finite(const void* data, std::size_t length) {
  const auto* in = static_cast<const Bits*>(data);
  constexpr std::size_t block = 4096;  // stop early where a gradient overflowed, without a branch per element
  for (std::size_t start = 0; start < length; start += block) {
    const std::size_t end = start + block < length ? start + block : length;
    Bits found = 0;
    for (std::size_t i = start; i < end; ++i) found |= static_cast<Bits>((in[i] & infinity) == infinity);
    if (found) return false;
  }
  return true;
}

// Selection. A source reads `Lanes::width` values at index i as 32-bit lanes, or one of them.

constexpr std::uint32_t magnitude_bits = 0x7fffffffu;

struct Bits32 {
  static constexpr std::uint32_t mask = magnitude_bits;
  const std::uint32_t* x;
  Lanes::Vector vector(std::size_t i) const { return Lanes::load(x + i); }
  std::uint32_t scalar(std::size_t i) const { return x[i]; }
};

struct Bits16 {
  static constexpr std::uint32_t mask = 0x7fffu;
  const std::uint16_t* x;
  Lanes::Vector vector(std::size_t i) const { return Lanes::load16(x + i); }
  std::uint32_t scalar(std::size_t i) const { return x[i]; }
};

template <class T>
struct Floats;
template <>
struct Floats<F32> : Bits32 {};
template <>
struct Floats<BF16> {
  static constexpr std::uint32_t mask = magnitude_bits;
  const std::uint16_t* x;
  Lanes::Vector vector(std::size_t i) const { return Lanes::shift16(Lanes::load16(x + i)); }
  std::uint32_t scalar(std::size_t i) const { return std::uint32_t{x[i]} << 16; }
};
template <>
struct Floats<F16> {
  static constexpr std::uint32_t mask = magnitude_bits;
  const std::uint16_t* x;
  Lanes::Vector vector(std::size_t i) const { return Lanes::from_half(x + i); }
  std::uint32_t scalar(std::size_t i) const { return bits_of(from_f16(x[i])); }
};

constexpr std::size_t word = 64;  // elements whose verdicts fill one word
constexpr std::size_t ahead = 1024;  // elements between a prefetch and its use: the walk below hides the pattern from the hardware

// Appends the lanes whose bit is set. The first three steps are taken whether or not there is one: at usual densities that is
// enough, and a branch that is often wrong costs more. What they write beyond `count` is overwritten.
template <class ValueAt>
std::size_t append(std::uint64_t bits, std::uint32_t base, std::uint32_t* indices, std::uint32_t* values, const ValueAt& value_at) {
  const auto count = static_cast<std::size_t>(__builtin_popcountll(bits));
  const auto put = [&](std::size_t at) {
    const auto lane = static_cast<std::uint32_t>(__builtin_ctzll(bits | std::uint64_t{1} << 63));
    indices[at] = base + lane;
    values[at] = value_at(lane);
    bits &= bits - 1;
  };
  for (std::size_t at = 0; at < 3; ++at) put(at);
  for (std::size_t at = 3; at < count; ++at) put(at);
  return count;
}

template <class Source>
std::size_t filter_source(const Source& source, std::size_t length, std::uint32_t base, std::uint32_t threshold,
                          std::uint32_t* indices, std::uint32_t* values) {
  const Lanes::Vector mask = Lanes::set(Source::mask), least = Lanes::set(threshold);
  std::size_t count = 0, i = 0;
  for (; i + word <= length; i += word) {
    const std::uint64_t bits =
        Lanes::word([&](std::size_t j) { return Lanes::at_least(Lanes::both(source.vector(i + j), mask), least); });
    for (std::size_t line = 0; line < word * sizeof *source.x; line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(source.x + i + ahead) + line);
    }
    count += append(bits, base + static_cast<std::uint32_t>(i), indices + count, values + count,
                    [&](std::size_t lane) { return source.scalar(i + lane); });
  }
  for (; i < length; ++i) {
    const std::uint32_t value = source.scalar(i);
    indices[count] = base + static_cast<std::uint32_t>(i);
    values[count] = value;
    count += (value & Source::mask) >= threshold;
  }
  return count;
}

template <class Source, class Item>
std::size_t filter(const void* data, std::size_t length, std::uint32_t base, std::uint32_t threshold, std::uint32_t* indices,
                   std::uint32_t* values) {
  return filter_source(Source{static_cast<const Item*>(data)}, length, base, threshold, indices, values);
}

// acc = residual + gradient, zero where it is appended: those entries are about to be sent, and here they are in the cache.
template <class T, class Item>
std::size_t accumulate_filter(const void* gradient, const float* residual, float* acc, std::size_t length, std::uint32_t base,
                              std::uint32_t threshold, std::uint32_t* indices, std::uint32_t* values) {
  const Floats<T> source{static_cast<const Item*>(gradient)};
  const Lanes::Vector mask = Lanes::set(magnitude_bits), least = Lanes::set(threshold);
  std::size_t count = 0, i = 0;
  alignas(64) std::uint32_t sums[word];
  for (; i + word <= length; i += word) {
    const std::uint64_t bits = Lanes::word([&](std::size_t j) {
      const Lanes::Vector sum = Lanes::add(Lanes::load(residual + i + j), source.vector(i + j));
      const Lanes::Mask large = Lanes::at_least(Lanes::both(sum, mask), least);
      Lanes::store(sums + j, sum);
      Lanes::store(acc + i + j, Lanes::without(large, sum));
      return large;
    });
    count += append(bits, base + static_cast<std::uint32_t>(i), indices + count, values + count,
                    [&](std::size_t lane) { return sums[lane]; });
  }
  for (; i < length; ++i) {
    const float sum = residual[i] + float_of(source.scalar(i));
    const bool large = (bits_of(sum) & magnitude_bits) >= threshold;
    indices[count] = base + static_cast<std::uint32_t>(i);
    values[count] = bits_of(sum);
    count += large;
    acc[i] = large ? 0.0f : sum;
  }
  return count;
}

// Sixteen running sums, element i into sum i % 16, then halves onto halves. Integers order as magnitudes do.
template <class T, class Item>
void moments(const void* data, std::size_t length, double* sum, std::uint32_t* largest) {
  typedef double Doubles __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  typedef std::uint32_t Words __attribute__((vector_size(16)));
  const Floats<T> source{static_cast<const Item*>(data)};
  Doubles sums[4] = {};
  Words tops[4] = {};
  std::uint32_t values[16];
  for (std::size_t i = 0; i < length; i += 16) {
    if (i + 16 <= length) {
      for (std::size_t j = 0; j < 16; j += Lanes::width) Lanes::store(values + j, source.vector(i + j));
    } else {
      for (std::size_t j = 0; j < 16; ++j) values[j] = i + j < length ? source.scalar(i + j) : 0;
    }
    for (std::size_t j = 0; j < 4; ++j) {
      Words word;
      __builtin_memcpy(&word, values + 4 * j, sizeof word);
      word &= magnitude_bits;
      tops[j] = word > tops[j] ? word : tops[j];
      sums[j] += __builtin_convertvector((Quarter)word, Doubles);
    }
  }
  const Doubles half[2] = {sums[0] + sums[2], sums[1] + sums[3]};
  const Doubles quarter = half[0] + half[1];
  *sum = (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
  std::uint32_t top = 0;
  for (const Words& word : tops) {
    for (int j = 0; j < 4; ++j) top = word[j] > top ? word[j] : top;
  }
  *largest = top;
}

}  // namespace

extern const PathKernels TOPKUBE_TABLE(TOPKUBE_PATH);
const PathKernels TOPKUBE_TABLE(TOPKUBE_PATH) = {
    .name = TOPKUBE_NAME(TOPKUBE_PATH),
    .widen = {widen<F32>, widen<BF16>, widen<F16>},
    .widen_add = {widen_add<F32>, widen_add<BF16>, widen_add<F16>},
    .narrow = {narrow<F32>, narrow<BF16>, narrow<F16>},
    .is_finite = {is_finite<std::uint32_t, 0x7f800000u>, is_finite<std::uint16_t, 0x7f80>, is_finite<std::uint16_t, 0x7c00>},
    .filter_bits = {filter<Bits32, std::uint32_t>, filter<Bits16, std::uint16_t>, filter<Bits16, std::uint16_t>},
    .filter_float = {filter<Floats<F32>, std::uint32_t>, filter<Floats<BF16>, std::uint16_t>,
                     filter<Floats<F16>, std::uint16_t>},
    .accumulate_filter = {accumulate_filter<F32, std::uint32_t>, accumulate_filter<BF16, std::uint16_t>,
                          accumulate_filter<F16, std::uint16_t>},
    .moments = {moments<F32, std::uint32_t>, moments<BF16, std::uint16_t>, moments<F16, std::uint16_t>},
    .add_f32 = add_f32,
};

}  // namespace topkube
