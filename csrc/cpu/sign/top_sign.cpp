#include "cpu/sign/top_sign.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "cpu/dtype.hpp"
#include "cpu/elements.hpp"
#include "cpu/float_state.hpp"
#include "cpu/paths/path.hpp"
#include "cpu/selection/chunks.hpp"
#include "cpu/selection/threshold.hpp"
#include "cpu/sign/sign.hpp"

namespace topkube {
namespace {

constexpr std::size_t word_bits = 64, word_bytes = 8, octet = 8;
constexpr std::size_t indices_at_once = 2048;  // of a message that is read: they stay in the cache for three steps

// The indices of the message in work. Threads keep the memory between calls.
thread_local std::vector<std::uint32_t> indices;

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

// Moves the first bit to the lowest place, and so on.
std::uint64_t reverse_bits(std::uint64_t word) {
  word = (word >> 1 & 0x5555555555555555u) | (word & 0x5555555555555555u) << 1;
  word = (word >> 2 & 0x3333333333333333u) | (word & 0x3333333333333333u) << 2;
  word = (word >> 4 & 0x0f0f0f0f0f0f0f0fu) | (word & 0x0f0f0f0f0f0f0f0fu) << 4;
  return __builtin_bswap64(word);
}

// Writes a message, block by block.
class Writer {
 public:
  Writer(const TopSignLayout& layout, std::uint8_t* message)
      : layout_(layout), message_(message), unary_(message + layout.unary), unary_bytes_(layout.bytes - layout.unary) {}

  // Writes the next `count` elements: a whole block, or the rest. Subtracts from `values` what is sent.
  void write(const std::uint32_t* from, float* values, std::size_t count) {
    const PathKernels& path = active_path();
    const std::uint16_t scale = path.sign_pack(values, count, message_ + layout_.bits + written_ / octet);
    std::memcpy(message_ + written_ / sign_block * sizeof scale, &scale, sizeof scale);
    is_finite_ = is_finite_ && is_finite_bf16(scale);
    path.write_planes(from, count, layout_.low, layout_.plane_bytes, message_ + layout_.planes + written_ / octet);
    // A full word is followed by a bit of the message, so all its bytes are in the message.
    unary_start_ +=
        path.write_unary(from, count, layout_.low, written_ - octet * unary_start_, &unary_word_, unary_ + unary_start_);
    written_ += count;
  }

  // Ends the message. Returns true if all scales are finite.
  bool finish() {
    while (unary_start_ < unary_bytes_) store_unary();
    std::fill(message_ + layout_.bits + octets(layout_.count), message_ + layout_.planes, std::uint8_t{0});
    return is_finite_;
  }

 private:
  void store_unary() {
    store_word(unary_ + unary_start_, unary_bytes_ - unary_start_, unary_word_);
    unary_start_ += word_bytes;
    unary_word_ = 0;
  }

  const TopSignLayout& layout_;
  std::uint8_t* message_;
  std::uint8_t* unary_;
  std::size_t unary_bytes_, written_ = 0, unary_start_ = 0;  // unary_start_: the byte at which unary_word_ begins
  std::uint64_t unary_word_ = 0;
  bool is_finite_ = true;
};

// Keeps the entries of a filter that are selected: those above the threshold, and the next `ties` that equal it.
std::size_t keep_selected(ExactThreshold& exact, std::size_t count, std::uint32_t* at, std::uint32_t* bits) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const bool is_tie = (bits[i] & magnitude_bits) == exact.threshold;
    if (is_tie && exact.ties == 0) continue;
    exact.ties -= is_tie;
    at[kept] = at[i];
    bits[kept++] = bits[i];
  }
  return kept;
}

// Sets each index to its higher bits. Returns false if the number of indices is not layout.count.
bool read_unary(const std::uint8_t* unary, const TopSignLayout& layout, std::uint32_t* to) {
  const std::size_t length = layout.bytes - layout.unary;
  std::size_t count = 0;
  for (std::size_t start = 0; start < layout.high; start += word_bits) {
    std::uint64_t word = reverse_bits(load_word(unary + start / octet, length - start / octet));
    if (layout.high - start < word_bits) word &= (std::uint64_t{1} << (layout.high - start)) - 1;
    if (count + static_cast<std::size_t>(std::popcount(word)) > layout.count) return false;
    for (; word != 0; word &= word - 1, ++count)
      to[count] = static_cast<std::uint32_t>(start + static_cast<std::size_t>(std::countr_zero(word)) - count) << layout.low;
  }
  return count == layout.count;
}

// Reads all indices. Returns false if they are not layout.count ascending indices below layout.length.
bool read_indices(const std::uint8_t* message, const TopSignLayout& layout, std::uint32_t* to) {
  if (!read_unary(message + layout.unary, layout, to)) return false;
  const PathKernels& path = active_path();
  bool is_ascending = true;
  for (std::size_t start = 0; start < layout.count; start += indices_at_once) {
    const std::size_t end = std::min(start + indices_at_once, layout.count);
    path.read_planes(message + layout.planes + start / octet, layout.plane_bytes, layout.low, end - start, to + start);
    for (std::size_t i = std::max<std::size_t>(start, 1); i < end; ++i) is_ascending &= to[i - 1] < to[i];
  }
  return is_ascending && to[layout.count - 1] < layout.length;
}

}  // namespace

bool top_sign_pack(float* values, const TopSignLayout& layout, int threads, std::uint8_t* message) {
  const IeeeScope ieee;
  FoundThreshold found = find_threshold(values, layout.length, layout.count, threads);
  ExactThreshold& exact = found.exact;
  const auto filter = active_path().filter_bits[code_of(Dtype::f32)];
  // The selected elements that are not yet written: less than a block of signs, and those of a block of elements.
  std::uint32_t at[sign_block + block + filter_slack];
  alignas(64) std::uint32_t bits[sign_block + block + filter_slack];
  std::size_t waiting = 0, taken = 0;
  Writer writer(layout, message);
  const auto write = [&](std::size_t first, std::size_t count) {
    float left[sign_block];
    std::memcpy(left, bits + first, count * sizeof *left);
    writer.write(at + first, left, count);
    for (std::size_t i = 0; i < count; ++i) values[at[first + i]] = left[i];
  };
  for (std::size_t start = 0; start < layout.length && taken < layout.count; start += block) {
    const bool keeps_ties = !found.has_more_ties || exact.ties > 0;
    std::size_t count = filter(values + start, std::min(block, layout.length - start), static_cast<std::uint32_t>(start),
                               exact.threshold + !keeps_ties, at + waiting, bits + waiting);
    if (found.has_more_ties && keeps_ties) count = keep_selected(exact, count, at + waiting, bits + waiting);
    taken += count;
    waiting += count;
    std::size_t first = 0;
    for (; first + sign_block <= waiting; first += sign_block) write(first, sign_block);
    std::copy(at + first, at + waiting, at);
    std::copy(bits + first, bits + waiting, bits);
    waiting -= first;
  }
  if (waiting > 0) write(0, waiting);
  return writer.finish();
}

bool top_sign_unpack_add(float* values, const TopSignLayout& layout, const std::uint8_t* message, float weight) {
  indices.resize(layout.count);
  std::uint32_t* const at = indices.data();
  if (!read_indices(message, layout, at)) return false;

  constexpr std::size_t ahead = 64;  // indices between a prefetch and its use
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
      __builtin_prefetch(values + at[std::min(start + i + ahead, layout.count - 1)], 1);
      float& value = values[at[start + i]];
      value = canonical(value + sent[i]);
    }
  }
  return true;
}

}  // namespace topkube
