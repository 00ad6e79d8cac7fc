// The inner loops of every kernel, compiled once per path: TOPKUBE_PATH is the name of the path, and CMake sets the instruction
// set.
//
// This unit exports only its table. It uses no function of the standard library, because the linker could share that function
// with a unit for an older CPU.
#include "cpu/paths/path_kernels.hpp"

#include "cpu/dtype.hpp"
#include "cpu/paths/lanes.hpp"

#define TOPKUBE_TABLE_(path) path##_kernels
#define TOPKUBE_TABLE(path) TOPKUBE_TABLE_(path)
#define TOPKUBE_NAME_(path) #path
#define TOPKUBE_NAME(path) TOPKUBE_NAME_(path)

namespace topkube {
namespace {

// Dense kernels. These are plain loops that the compiler vectorises. Lane-wise arithmetic has the same bits at any vector width.
// `narrow` makes NaNs canonical, so `widen_add`, which comes before it, does not.

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
#pragma GCC ivdep
  for (std::size_t i = 0; i < length; ++i) out[i] = canonical((a[i] + b[i]) * scale);
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

template <class Bits, Bits infinity>
bool is_finite(const void* data, std::size_t length) {
  const auto* in = static_cast<const Bits*>(data);
  constexpr std::size_t block = 4096;  // stops early if a gradient has overflowed, without a branch per element
  for (std::size_t start = 0; start < length; start += block) {
    const std::size_t end = start + block < length ? start + block : length;
    Bits nonfinite = 0;
    for (std::size_t i = start; i < end; ++i) nonfinite |= static_cast<Bits>((in[i] & infinity) == infinity);
    if (nonfinite) return false;
  }
  return true;
}

// Selection. A source reads `Lanes::width` values from index i on as 32-bit lanes, or the single value at index i.

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

constexpr std::size_t word = 64;  // elements per mask word
constexpr std::size_t ahead =
    1024;  // elements between a prefetch and its use; the hardware does not recognise the access pattern below

// Appends the lanes whose bit is set. The first three steps always run, even if fewer bits are set: three steps are enough at usual
// densities, and a branch that is often mispredicted costs more. Entries written beyond `count` are overwritten later.
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

// Writes acc = residual + gradient, and zero for appended entries: those are sent next, and they are in the cache now.
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
    const float sum = canonical(residual[i] + float_of(source.scalar(i)));
    const bool large = (bits_of(sum) & magnitude_bits) >= threshold;
    indices[count] = base + static_cast<std::uint32_t>(i);
    values[count] = bits_of(sum);
    count += large;
    acc[i] = large ? 0.0f : sum;
  }
  return count;
}

// Keeps sixteen running sums: element i goes into sum i % 16. At the end, halves are added to halves. The integer order of the bits
// is the order of the magnitudes.
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

// Signs. These loops use the compiler's vectors, of the width of this path's registers: wider ones would pass through memory.

#if defined(__AVX512F__)
#define TOPKUBE_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define TOPKUBE_VECTOR_BYTES 32
#else
#define TOPKUBE_VECTOR_BYTES 16
#endif
constexpr std::uint32_t sign_bit = 0x80000000u;
constexpr std::size_t width = TOPKUBE_VECTOR_BYTES / 4;  // lanes of a vector
constexpr std::size_t vectors = 16 / width;              // vectors of sixteen lanes
typedef float Floats32 __attribute__((vector_size(TOPKUBE_VECTOR_BYTES)));
typedef std::uint32_t Words32 __attribute__((vector_size(TOPKUBE_VECTOR_BYTES)));

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

// Keeps sixteen running sums: element i goes into sum i % 16. At the end, halves are added to halves.
std::uint16_t sign_pack(float* values, std::size_t length, std::uint8_t* bits) {
  alignas(64) float sums[16] = {};
  const std::size_t whole = length / 16 * 16;
  Floats32 running[vectors] = {};
  for (std::size_t i = 0; i < whole; i += 16) {
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
  return scale;
}

// Adds +-scales over the parts, in their order, to the sums of 32 elements.
struct SignSums {
#if defined(__AVX512F__)
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
    for (int j = 0; j < 2; ++j) _mm512_storeu_ps(values + 16 * j, _mm512_add_ps(_mm512_loadu_ps(values + 16 * j), sums[j]));
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
    for (int j = 0; j < 4; ++j) _mm256_storeu_ps(values + 8 * j, _mm256_add_ps(_mm256_loadu_ps(values + 8 * j), sums[j]));
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
      __builtin_memcpy(values + v * width, &value, sizeof value);
    }
  }
#endif
};

void sign_unpack_add(float* values, std::size_t length, const float* scales, const std::uint8_t* const* bits, std::size_t parts) {
  std::size_t i = 0;
  for (; i + 32 <= length; i += 32) {
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
    values[i] += sum;
  }
}

// Integers of 4 or 8 bits. These are plain loops that the compiler vectorises, over whole blocks: the rest of a short block is
// zeros.

constexpr std::size_t block = 256;
constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: added to x, it rounds x to an integer, which is in the low bits of the sum

std::uint16_t quantised_pack(float* values, std::size_t length, int bits, std::uint8_t* codes) {
  std::int32_t largest = 0;  // the order of magnitudes is the order of their bits
  for (std::size_t i = 0; i < length; ++i) {
    const auto magnitude = static_cast<std::int32_t>(bits_of(values[i]) & magnitude_bits);
    largest = magnitude > largest ? magnitude : largest;
  }
  const float step = float_of(static_cast<std::uint32_t>(largest)) / (bits == 8 ? 127.0f : 7.0f);
  const std::uint32_t rounded_up = (bits_of(step) + 0xffffu) & 0xffff0000u;
  const bool is_finite = largest < 0x7f800000, is_small = rounded_up < 0x00800000u;
  const float scale = float_of(!is_finite ? canonical_nan : is_small ? 0u : rounded_up);
  const float inverse = is_finite && !is_small ? 1.0f / scale : 0.0f;
  std::uint8_t integers[block] = {};
  for (std::size_t i = 0; i < length; ++i) {
    const float sum = values[i] * inverse + to_integer;
    integers[i] = static_cast<std::uint8_t>(bits_of(sum));
    values[i] -= (sum - to_integer) * scale;
  }
  if (bits == 8) {
    __builtin_memcpy(codes, integers, length);
  } else {
    for (std::size_t i = 0; i < length; i += 32) {
      for (std::size_t j = 0; j < 16; ++j) {
        codes[i / 2 + j] = static_cast<std::uint8_t>((integers[i + j] & 15) | integers[i + 16 + j] << 4);
      }
    }
  }
  return static_cast<std::uint16_t>(bits_of(scale) >> 16);
}

void quantised_unpack_add(float* values, std::size_t length, int bits, const float* scales, const std::uint8_t* const* codes,
                          std::size_t messages) {
  alignas(64) float sums[block] = {};
  for (std::size_t m = 0; m < messages; ++m) {
    const float scale = scales[m];
    if (bits == 8) {
      const auto* integers = reinterpret_cast<const std::int8_t*>(codes[m]);
      for (std::size_t i = 0; i < length; ++i) sums[i] += static_cast<float>(integers[i]) * scale;
    } else {
      for (std::size_t i = 0; i < length; i += 32) {
        for (std::size_t j = 0; j < 16; ++j) {
          const auto byte = static_cast<std::int8_t>(codes[m][i / 2 + j]);
          sums[i + j] += static_cast<float>(static_cast<std::int8_t>(byte << 4) >> 4) * scale;
          sums[i + 16 + j] += static_cast<float>(byte >> 4) * scale;
        }
      }
    }
  }
  for (std::size_t i = 0; i < length; ++i) values[i] += sums[i];
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
    .filter_float = {filter<Floats<F32>, std::uint32_t>, filter<Floats<BF16>, std::uint16_t>, filter<Floats<F16>, std::uint16_t>},
    .accumulate_filter = {accumulate_filter<F32, std::uint32_t>, accumulate_filter<BF16, std::uint16_t>,
                          accumulate_filter<F16, std::uint16_t>},
    .moments = {moments<F32, std::uint32_t>, moments<BF16, std::uint16_t>, moments<F16, std::uint16_t>},
    .add_f32 = add_f32,
    .sign_pack = sign_pack,
    .sign_unpack_add = sign_unpack_add,
    .quantised_pack = quantised_pack,
    .quantised_unpack_add = quantised_unpack_add,
};

}  // namespace topkube
