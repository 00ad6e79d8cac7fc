#include "cpu/sign/top_sign.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "cpu/dtype.hpp"
#include "cpu/float_state.hpp"
#include "cpu/paths/path.hpp"
#include "cpu/selection/select.hpp"
#include "cpu/sign/sign.hpp"

namespace topkube {
namespace {

constexpr std::size_t word_bits = 64, word_bytes = 8, octet = 8;
constexpr std::uint64_t lowest_of_each_byte = 0x0101010101010101u;

// The entries of the message in work. Threads keep the memory between calls.
thread_local std::vector<std::uint32_t> indices;
thread_local std::vector<float> chosen;

std::size_t octets(std::size_t bits) { return (bits + octet - 1) / octet; }

// Returns the eight bytes from `data` on, of which `available` exist. The first byte is the highest.
std::uint64_t load_word(const std::uint8_t* data, std::size_t available) {
  std::uint64_t word = 0;
  if (available >= word_bytes && std::endian::native == std::endian::little) {
    std::memcpy(&word, data, word_bytes);
    return __builtin_bswap64(word);
  }
  for (std::size_t i = 0; i < word_bytes; ++i) word = word << 8 | (i < available ? data[i] : 0u);
  return word;
}

void store_word(std::uint8_t* data, std::size_t available, std::uint64_t word) {
  if (available >= word_bytes && std::endian::native == std::endian::little) {
    word = __builtin_bswap64(word);
    std::memcpy(data, &word, word_bytes);
    return;
  }
  for (std::size_t i = 0; i < std::min(word_bytes, available); ++i) data[i] = static_cast<std::uint8_t>(word >> (56 - 8 * i));
}

// Writes one byte of each plane, for the `count` indices from `from` on, at most eight. A product with `collect` moves the lowest
// bits of eight bytes into its highest byte.
inline void write_octet(const std::uint32_t* from, std::size_t count, const TopSignLayout& layout, std::uint8_t* planes) {
  constexpr std::uint64_t collect = 0x0102040810204080u;
  for (unsigned first = 0; first < layout.low; first += 8) {
    std::uint64_t bytes = 0;  // bits first to first + 7 of each index; the first index has the highest byte
    for (std::size_t j = 0; j < count; ++j) bytes |= std::uint64_t{(from[j] >> first) & 0xffu} << (56 - 8 * j);
    for (unsigned plane = first; plane < std::min(first + 8, layout.low); ++plane, bytes >>= 1)
      planes[plane * layout.plane_bytes] = static_cast<std::uint8_t>((bytes & lowest_of_each_byte) * collect >> 56);
  }
}

// Does the inverse of `write_octet`: sets the `low` lowest bits of the indices. One product copies a byte of a plane into all eight
// bytes of a word; byte j of the word keeps the bit of index j, and becomes 1 if that bit is set.
inline void read_octet(const std::uint8_t* planes, std::size_t count, const TopSignLayout& layout, std::uint32_t* to) {
  constexpr std::uint64_t bit_of_each_byte = 0x0102040810204080u, below_sign = 0x7f7f7f7f7f7f7f7fu;
  for (unsigned first = 0; first < layout.low; first += 8) {
    std::uint64_t bytes = 0;  // the first index has the lowest byte
    for (unsigned plane = first; plane < std::min(first + 8, layout.low); ++plane) {
      const std::uint64_t bits = planes[plane * layout.plane_bytes] * lowest_of_each_byte & bit_of_each_byte;
      bytes |= ((bits + below_sign) >> 7 & lowest_of_each_byte) << (plane - first);
    }
    for (std::size_t j = 0; j < count; ++j) to[j] |= static_cast<std::uint32_t>(bytes >> (8 * j) & 0xffu) << first;
  }
}

// Calls process(place of the first index, number of indices) for all indices, eight at a time. For a full octet the number is a
// constant, so that the compiler can unroll the loops.
template <class Process>
void for_each_octet(std::size_t count, Process process) {
  std::size_t i = 0;
  for (; i + octet <= count; i += octet) process(i, octet);
  if (i < count) process(i, count - i);
}

void write_planes(const std::uint32_t* from, const TopSignLayout& layout, std::uint8_t* planes) {
  for_each_octet(layout.count, [&](std::size_t i, std::size_t count) { write_octet(from + i, count, layout, planes + i / octet); });
}

void read_planes(const std::uint8_t* planes, const TopSignLayout& layout, std::uint32_t* to) {
  for_each_octet(layout.count, [&](std::size_t i, std::size_t count) { read_octet(planes + i / octet, count, layout, to + i); });
}

void write_unary(const std::uint32_t* from, const TopSignLayout& layout, std::uint8_t* unary) {
  const std::size_t length = layout.bytes - layout.unary;
  std::size_t i = 0;
  for (std::size_t start = 0; start < length; start += word_bytes) {
    const std::size_t first_bit = octet * start;
    std::uint64_t word = 0;
    for (; i < layout.count; ++i) {
      const std::size_t position = (from[i] >> layout.low) + i - first_bit;
      if (position >= word_bits) break;
      word |= std::uint64_t{1} << (word_bits - 1 - position);
    }
    store_word(unary + start, length - start, word);
  }
}

// Sets each index to its higher bits. Returns false if the number of indices is not layout.count.
bool read_unary(const std::uint8_t* unary, const TopSignLayout& layout, std::uint32_t* to) {
  const std::size_t length = layout.bytes - layout.unary;
  std::size_t count = 0;
  for (std::size_t start = 0; start < layout.high; start += word_bits) {
    std::uint64_t word = load_word(unary + start / octet, length - start / octet);
    if (layout.high - start < word_bits) word &= ~(~std::uint64_t{0} >> (layout.high - start));
    if (count + static_cast<std::size_t>(std::popcount(word)) > layout.count) return false;
    for (; word != 0; ++count) {
      const auto zeros = static_cast<unsigned>(std::countl_zero(word));
      word ^= std::uint64_t{1} << (word_bits - 1 - zeros);
      to[count] = static_cast<std::uint32_t>(start + zeros - count) << layout.low;
    }
  }
  return count == layout.count;
}

bool are_ascending_below(const std::uint32_t* from, std::size_t count, std::size_t length) {
  bool is_ascending = true;
  for (std::size_t i = 1; i < count; ++i) is_ascending &= from[i - 1] < from[i];
  return is_ascending && from[count - 1] < length;
}

}  // namespace

bool top_sign_pack(float* values, const TopSignLayout& layout, int threads, std::uint8_t* message) {
  indices.resize(layout.count);
  chosen.resize(layout.count);
  topk(values, Dtype::f32, layout.length, layout.count, threads, indices.data(), chosen.data());
  std::uint8_t* bits = message + layout.bits;
  const bool finite = sign_pack(chosen.data(), layout.count, reinterpret_cast<std::uint16_t*>(message), bits);
  std::fill(bits + octets(layout.count), message + layout.planes, std::uint8_t{0});
  for (std::size_t i = 0; i < layout.count; ++i) values[indices[i]] = chosen[i];
  write_planes(indices.data(), layout, message + layout.planes);
  write_unary(indices.data(), layout, message + layout.unary);
  return finite;
}

bool top_sign_unpack_add(float* values, const TopSignLayout& layout, const std::uint8_t* message, float weight) {
  indices.resize(layout.count);
  if (!read_unary(message + layout.unary, layout, indices.data())) return false;
  read_planes(message + layout.planes, layout, indices.data());
  if (!are_ascending_below(indices.data(), layout.count, layout.length)) return false;

  const IeeeScope ieee;
  const PathKernels& path = active_path();
  for (std::size_t start = 0; start < layout.count; start += sign_block) {
    const std::size_t in_block = std::min(sign_block, layout.count - start);
    std::uint16_t scale_bits;
    std::memcpy(&scale_bits, message + start / sign_block * sizeof scale_bits, sizeof scale_bits);
    const float scale = from_bf16(scale_bits) * weight;
    const std::uint8_t* bits = message + layout.bits + start / octet;
    float sent[sign_block] = {};
    path.sign_unpack_add(sent, in_block, &scale, &bits, 1);
    for (std::size_t i = 0; i < in_block; ++i) {
      float& value = values[indices[start + i]];
      value = canonical(value + sent[i]);
    }
  }
  return true;
}

}  // namespace topkube
