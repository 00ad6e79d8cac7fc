// The loops of selection. A source loads `Lanes::width` values from index i on as 32-bit lanes, or the single value at index i.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.hpp"
#include "cpu/paths/lanes.hpp"

namespace topkube {
namespace {

struct Bits32 {
  static constexpr std::uint32_t mask = magnitude_bits;
  const std::uint32_t* x;
  Lanes::Vector load_vector(std::size_t i) const { return Lanes::load(x + i); }
  std::uint32_t load_scalar(std::size_t i) const { return x[i]; }
};

struct Bits16 {
  static constexpr std::uint32_t mask = 0x7fffu;
  const std::uint16_t* x;
  Lanes::Vector load_vector(std::size_t i) const { return Lanes::load_16_bits(x + i); }
  std::uint32_t load_scalar(std::size_t i) const { return x[i]; }
};

template <class T>
struct FloatSource;
template <>
struct FloatSource<F32> : Bits32 {};
template <>
struct FloatSource<BF16> {
  static constexpr std::uint32_t mask = magnitude_bits;
  const std::uint16_t* x;
  Lanes::Vector load_vector(std::size_t i) const { return Lanes::shift_left_16(Lanes::load_16_bits(x + i)); }
  std::uint32_t load_scalar(std::size_t i) const { return std::uint32_t{x[i]} << 16; }
};
template <>
struct FloatSource<F16> {
  static constexpr std::uint32_t mask = magnitude_bits;
  const std::uint16_t* x;
  Lanes::Vector load_vector(std::size_t i) const { return Lanes::load_fp16(x + i); }
  std::uint32_t load_scalar(std::size_t i) const { return bits_of(from_f16(x[i])); }
};

constexpr std::size_t word_elements = 64;  // elements per mask word
// Elements between a prefetch and its use. The hardware does not recognise the access pattern below.
constexpr std::size_t prefetch_distance = 1024;

// Appends the elements from `start` on whose bit is set: their indices, from `base` on, and their values. If up to three bits are set,
// three steps always run: a branch that is often mispredicted costs more. Entries written beyond `count` are overwritten later.
template <class Source>
std::size_t append_set_lanes(std::uint64_t bits, std::uint32_t base, std::uint32_t* indices, std::uint32_t* values,
                             const Source& source, std::size_t start) {
  const auto count = static_cast<std::size_t>(__builtin_popcountll(bits));
  if (count <= 3) {
    for (std::size_t at = 0; at < 3; ++at) {
      const auto lane = static_cast<std::uint32_t>(__builtin_ctzll(bits | std::uint64_t{1} << 63));
      indices[at] = base + lane;
      values[at] = source.load_scalar(start + lane);
      bits &= bits - 1;
    }
    return count;
  }
  constexpr std::uint32_t lanes = (1u << Lanes::width) - 1;
  for (std::uint32_t j = 0; j < word_elements; j += Lanes::width, bits >>= Lanes::width) {
    const std::uint32_t set = static_cast<std::uint32_t>(bits) & lanes;
    Lanes::store_selected(indices, set, Lanes::count_up(base + j));
    Lanes::store_selected(values, set, source.load_vector(start + j));
    indices += __builtin_popcount(set);
    values += __builtin_popcount(set);
  }
  return count;
}

// Appends the entries of at least `threshold`, from a source. Returns their number.
template <class Source>
std::size_t filter_source(const Source& source, std::size_t length, std::uint32_t base, std::uint32_t threshold,
                          std::uint32_t* indices, std::uint32_t* values) {
  const Lanes::Vector magnitude_mask = Lanes::broadcast(Source::mask), least = Lanes::broadcast(threshold);
  std::size_t count = 0, i = 0;
  for (; i + word_elements <= length; i += word_elements) {
    const std::uint64_t bits = Lanes::pack_masks([&](std::size_t j) {
      return Lanes::compare_at_least(Lanes::bitwise_and(source.load_vector(i + j), magnitude_mask), least);
    });
    for (std::size_t line = 0; line < word_elements * sizeof *source.x; line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(source.x + i + prefetch_distance) + line);
    }
    count += append_set_lanes(bits, base + static_cast<std::uint32_t>(i), indices + count, values + count, source, i);
  }
  for (; i < length; ++i) {
    const std::uint32_t value = source.load_scalar(i);
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

// Appends the magnitudes in [lower, upper) to `magnitudes`, and returns their number. Adds the number of larger ones to `above`.
std::size_t collect_between(const float* data, std::size_t length, std::uint32_t lower, std::uint32_t upper,
                            std::uint32_t* magnitudes, std::size_t* above) {
  const Bits32 source{reinterpret_cast<const std::uint32_t*>(data)};
  const Lanes::Vector magnitude_mask = Lanes::broadcast(magnitude_bits), least = Lanes::broadcast(lower),
                      end = Lanes::broadcast(upper);
  std::size_t count = 0, larger = 0, i = 0;
  for (; i + word_elements <= length; i += word_elements) {
    const auto reach = [&](const Lanes::Vector& threshold) {
      return Lanes::pack_masks([&](std::size_t j) {
        return Lanes::compare_at_least(Lanes::bitwise_and(source.load_vector(i + j), magnitude_mask), threshold);
      });
    };
    const std::uint64_t large = reach(end);
    std::uint64_t bits = reach(least) & ~large;
    for (std::size_t line = 0; line < word_elements; line += 16) __builtin_prefetch(source.x + i + prefetch_distance + line);
    larger += static_cast<std::size_t>(__builtin_popcountll(large));
    const auto between = static_cast<std::size_t>(__builtin_popcountll(bits));
    const auto put = [&](std::size_t at) {
      const auto lane = static_cast<std::size_t>(__builtin_ctzll(bits | std::uint64_t{1} << 63));
      magnitudes[count + at] = source.load_scalar(i + lane) & magnitude_bits;
      bits &= bits - 1;
    };
    for (std::size_t at = 0; at < 3; ++at) put(at);
    for (std::size_t at = 3; at < between; ++at) put(at);
    count += between;
  }
  for (; i < length; ++i) {
    const std::uint32_t magnitude = source.load_scalar(i) & magnitude_bits;
    magnitudes[count] = magnitude;
    count += magnitude >= lower && magnitude < upper;
    larger += magnitude >= upper;
  }
  *above += larger;
  return count;
}

// Writes acc = residual + gradient, and filters the sums. Appended entries are zero in acc, because they are sent next; acc is in
// the cache now.
template <class T, class Item>
std::size_t accumulate_filter(const void* gradient, const float* residual, float* acc, std::size_t length, std::uint32_t base,
                              std::uint32_t threshold, std::uint32_t* indices, std::uint32_t* values) {
  const FloatSource<T> source{static_cast<const Item*>(gradient)};
  const Lanes::Vector magnitude_mask = Lanes::broadcast(magnitude_bits), least = Lanes::broadcast(threshold);
  std::size_t count = 0, i = 0;
  alignas(64) std::uint32_t sums[word_elements];
  for (; i + word_elements <= length; i += word_elements) {
    const std::uint64_t bits = Lanes::pack_masks([&](std::size_t j) {
      const Lanes::Vector sum = Lanes::add(Lanes::load(residual + i + j), source.load_vector(i + j));
      const Lanes::Mask large = Lanes::compare_at_least(Lanes::bitwise_and(sum, magnitude_mask), least);
      Lanes::store(sums + j, sum);
      Lanes::store(acc + i + j, Lanes::clear_lanes(large, sum));
      return large;
    });
    count += append_set_lanes(bits, base + static_cast<std::uint32_t>(i), indices + count, values + count, Bits32{sums}, 0);
  }
  for (; i < length; ++i) {
    const float sum = canonical(residual[i] + float_of(source.load_scalar(i)));
    const bool large = (bits_of(sum) & magnitude_bits) >= threshold;
    indices[count] = base + static_cast<std::uint32_t>(i);
    values[count] = bits_of(sum);
    count += large;
    acc[i] = large ? 0.0f : sum;
  }
  return count;
}

// Computes the sum of |x| in double, and the bits of the largest |x|. Element i is added to running sum i % 16. At the end, the
// second half of the sums is added to the first half, until one sum is left. The integer order of the bits is the order of the
// magnitudes.
template <class T, class Item>
void summarise_magnitudes(const void* data, std::size_t length, double* sum, std::uint32_t* largest) {
  typedef double Doubles __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  typedef std::uint32_t Words __attribute__((vector_size(16)));
  const FloatSource<T> source{static_cast<const Item*>(data)};
  Doubles sums[4] = {};
  Words tops[4] = {};
  std::uint32_t values[16];
  for (std::size_t i = 0; i < length; i += 16) {
    if (i + 16 <= length) {
      for (std::size_t j = 0; j < 16; j += Lanes::width) Lanes::store(values + j, source.load_vector(i + j));
    } else {
      for (std::size_t j = 0; j < 16; ++j) values[j] = i + j < length ? source.load_scalar(i + j) : 0;
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
}  // namespace topkube
