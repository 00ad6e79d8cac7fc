// 3, 4 or 8 bits per element on the GPU: the same messages and remainders as csrc/cpu/quantised/quantised.hpp, which describes the
// format.
#pragma once

#include "../cpu/quantised/layout.hpp"
#include "../cpu/quantised/squares.hpp"
#include "levels.hpp"
#include "parts.hpp"

namespace topkube {

constexpr u32 quantise_threads = 256, quantise_blocks = 5;
// 1.5 * 2^23. The low bits of x + rounding_term are x, rounded to an integer.
constexpr float rounding_term = 12582912.0f;

// The scale of a block whose largest magnitude has the bits `largest`, and the factor that turns an element into its integer.
struct Step {
  float scale, inverse;
};
template <int bits>
TOPKUBE_DEVICE Step find_step(u32 largest) {
  const float step = gpu::divide(float_of(largest), bits == 8 ? 127.0f : bits == 4 ? 49.0f : level_bound);
  const u32 rounded_up = (bits_of(step) + 0xffffu) & 0xffff0000u;
  if (largest >= infinity_bits) return {float_of(canonical_nan), 0.0f};
  if (rounded_up < (bits == 3 ? bits_of(smallest_level_scale) : smallest_normal_bits)) return {0.0f, 0.0f};
  return {float_of(rounded_up), gpu::divide(1.0f, float_of(rounded_up))};
}

// Returns the integer of `item` in the low byte, and replaces `item` by what is not sent. In a block with a NaN or an infinite
// element, the arithmetic of the CPU with 8 bits passes the low byte of a NaN on, and 0 for all other elements; with 4 bits, all
// integers are 0.
template <int bits>
TOPKUBE_DEVICE u32 quantise(float& item, const Step& step) {
  const u32 from = bits_of(item);
  if constexpr (bits == 8) {
    const float sum = gpu::plus(gpu::times(item, step.inverse), rounding_term);
    item = canonical(gpu::minus(item, gpu::times(gpu::minus(sum, rounding_term), step.scale)));
    if ((from & magnitude_bits) > infinity_bits) return from & 0xffu;
    return (from & magnitude_bits) == infinity_bits ? 0u : bits_of(sum) & 0xffu;
  } else {
    const float magnitude = gpu::times(float_of(from & magnitude_bits), step.inverse);
    float root = 0;
#pragma unroll
    for (int r = 0; r < largest_root; ++r) root += magnitude > limit_above_square(r) ? 1.0f : 0.0f;
    root = float_of(bits_of(root) | (from & ~magnitude_bits));
    item = canonical(gpu::minus(item, gpu::times(signed_square(root), step.scale)));
    return bits_of(gpu::plus(root, rounding_term)) & 0xffu;
  }
}

// Parts of an array, and the byte of a row at which the message of each begins.
struct IntegerTable : PartTable {
  u64 places[table_parts];
};

// A warp packs one block of 256 elements: lane i has the elements 4 i to 4 i + 3 of both halves. They stay in registers between the
// search for the largest and the subtraction, so memory is read and written once. Units are blocks.
template <int bits>
TOPKUBE_KERNEL(quantise_threads, quantise_blocks) pack_integers(float* all, std::uint8_t* row, IntegerTable parts, u32* flag) {
  constexpr u32 quads = quads_of_block;
  const u64 warps = u64{gpu::blocks()} * (gpu::threads() / 32);
  const u32 lane = gpu::lane();
  for (u64 unit = u64{gpu::block()} * (gpu::threads() / 32) + gpu::warp(); unit < parts.units(); unit += warps) {
    u64 block = unit;
    const u32 i = parts.find(block);
    const u64 length = parts.lengths[i], blocks = (length + quantised_block - 1) / quantised_block;
    const QuantisedLayout layout(length, bits);
    float* values = all + parts.starts[i];
    std::uint8_t* message = row + parts.places[i];
    const bool aligned = reinterpret_cast<std::uintptr_t>(values) % sizeof(Quad) == 0;
    const u64 base = block * quantised_block + quad * lane;
    Quad items[quads];
    u32 largest = 0;
#pragma unroll
    for (u32 q = 0; q < quads; ++q) items[q] = load_quad(values, base + 32 * quad * q, length, aligned);
#pragma unroll
    for (u32 q = 0; q < quads; ++q) {
#pragma unroll
      for (u32 j = 0; j < quad; ++j) {
        const u32 magnitude = bits_of(items[q].items[j]) & magnitude_bits;
        largest = magnitude > largest ? magnitude : largest;
      }
    }
    largest = gpu::warp_largest(largest);
    const Step step = find_step<bits>(largest);
    if constexpr (bits == 3) {
      const u64 start = block * quantised_block;
      pack_levels(items, step.scale, step.inverse != 0.0f, length - start,
                  message + layout.codes + quantised_code_bytes(start, bits));
#pragma unroll
      for (u32 q = 0; q < quads; ++q) store_quad(values, base + 32 * quad * q, length, aligned, items[q]);
    }
#pragma unroll
    for (u32 q = 0; bits != 3 && q < quads; ++q) {
      const u64 first = base + 32 * quad * q;
      u32 word = 0;
#pragma unroll
      for (u32 j = 0; j < quad; ++j) word |= quantise<bits>(items[q].items[j], step) << (8 * j);
      store_quad(values, first, length, aligned, items[q]);
      if constexpr (bits == 8) {
        std::uint8_t* to = message + layout.codes + first;
        if (first + quad <= length) {
          store_word(to, word);
        } else {
          for (u32 j = 0; first + j < length; ++j) to[j] = static_cast<std::uint8_t>(word >> (8 * j));
        }
      } else {  // element j of 32 has the low half of byte j, and element 16 + j, which is four lanes further on, its high half
        const u32 later = gpu::shuffle_xor(word, 4u);
        if ((lane & 4u) == 0 && first / 32 * 32 < length) {
          store_word(message + layout.codes + first / 32 * 16 + first % 32, (word & 0x0f0f0f0fu) | (later & 0x0f0f0f0fu) << 4);
        }
      }
    }
    if (lane == 0) {
      store_half(message + 2 * block, bits_of(step.scale) >> 16);
      note_scale(flag, bits_of(step.scale) >> 16);
    }
    if (block == blocks - 1) {
      if (layout.scales_end + lane < layout.codes) message[layout.scales_end + lane] = 0;
      if (layout.end + lane < layout.bytes) message[layout.end + lane] = 0;
    }
  }
}

// Returns byte j of `word`, a number below 2^bits, minus 2^(bits - 1). The byte becomes the lowest bits of the float 2^23 + byte, so
// no conversion is needed: a GPU converts fewer integers at a time than it adds floats.
template <int bits>
TOPKUBE_DEVICE float centred_byte(u32 word, u32 j) {
  return gpu::minus(float_of(gpu::permute(word, 0x4b000000u, 0x7440u | j)), 8388608.0f + (1 << (bits - 1)));
}

// How a lane reads and adds a message of integers (see `unpack_add`).
template <int bits>
struct IntegerReader {
  static_assert(scale_block == quantised_block);
  static constexpr u32 blocks = bits == 8 ? 3 : 4, ahead = 2, part_words = bits == 8 ? tile_quads : tile_blocks;
  static constexpr u32 word_stride = 32 * sizeof(u32);
  struct Part {
    u32 scales[tile_blocks], words[part_words];
  };
  // A word of 8 bits each has one quad. A word of 4 bits each has two, which are 16 elements apart.
  TOPKUBE_DEVICE_MEMBER static u32 lane_position() {
    return bits == 8 ? gpu::lane() * quad : gpu::lane() / 4 * 32 + gpu::lane() % 4 * quad;
  }
  static constexpr u32 quad_offset(u32 c) { return bits == 8 ? 32 * quad * c : c / 2 * quantised_block + c % 2 * 16; }

  template <bool whole>
  TOPKUBE_DEVICE_MEMBER static void load(const std::uint8_t* message, u64 codes, u64 base, u64 length, Part& part) {
    const std::uint8_t* from = message + codes + base * bits / 8 + gpu::lane() * sizeof(u32);
    if constexpr (whole) {
      load_words(from, word_stride, part.words);
    } else {
#pragma unroll
      for (u32 w = 0; w < part_words; ++w) {
        const u64 i = base + lane_position() + quad_offset(w * tile_quads / part_words);
        part.words[w] = load_last_word(from + w * word_stride, i, length);
      }
    }
#pragma unroll
    for (u32 b = 0; b < tile_blocks; ++b) {
      const u64 block = base / quantised_block + b;
      part.scales[b] = whole || block * quantised_block < length ? load_half(message + 2 * block) : 0u;
    }
  }

  TOPKUBE_DEVICE_MEMBER static void add(float weight, const Part& part, Quad (&sums)[tile_quads]) {
#pragma unroll
    for (u32 c = 0; c < tile_quads; ++c) {
      const float scale = gpu::times(from_bf16(static_cast<u16>(part.scales[c * tile_blocks / tile_quads])), weight);
      const u32 word = bits == 8 ? part.words[c] ^ 0x80808080u : (part.words[c / 2] >> (c % 2 * 4) & 0x0f0f0f0fu) ^ 0x08080808u;
#pragma unroll
      for (u32 j = 0; j < quad; ++j) {
        const float integer = centred_byte<bits>(word, j);
        const float value = bits == 8 ? integer : gpu::times(integer, gpu::magnitude(integer));
        sums[c].items[j] = gpu::plus(sums[c].items[j], gpu::times(value, scale));
      }
    }
  }

 private:
  // Returns the word whose first integer is that of element i, without reading beyond the integers. Those of 4 bits fill the last
  // 16 bytes.
  TOPKUBE_DEVICE_MEMBER static u32 load_last_word(const std::uint8_t* from, u64 i, u64 length) {
    if (bits == 8 ? i + quad <= length : i / 32 * 32 < length) return load_word(from);
    u32 word = 0;
    for (u32 j = 0; bits == 8 && i + j < length; ++j) word |= u32{from[j]} << (8 * j);
    return word;
  }
};

template <>
struct IntegerReader<3> : LevelReader {};

// The messages of nodes, as an argument of `unpack_add`.
template <int bits>
struct IntegerMessages : IntegerReader<bits> {
  using Reader = IntegerReader<bits>;
  const std::uint8_t* messages[most_parts];
  float weights[most_parts];
  u64 codes;
  u32 count;

  template <bool whole>
  TOPKUBE_DEVICE_MEMBER void load(u32 m, u64 base, u64 length, typename Reader::Part& part) const {
    Reader::template load<whole>(messages[m], codes, base, length, part);
  }
  TOPKUBE_DEVICE_MEMBER void add(u32 m, const typename Reader::Part& part, Quad (&sums)[tile_quads]) const {
    Reader::add(weights[m], part, sums);
  }
};

// The rows of nodes, as an argument of `unpack_add_parts`.
template <int bits>
struct IntegerRows : IntegerReader<bits> {
  using Reader = IntegerReader<bits>;
  static constexpr u32 blocks = bits == 3 ? 2 : 3;
  const std::uint8_t* rows[most_parts];
  float weights[most_parts];
  u32 count;
  IntegerTable parts;

  struct Messages : Reader {
    const IntegerRows& all;
    u64 place, codes;
    u32 count;

    template <bool whole>
    TOPKUBE_DEVICE_MEMBER void load(u32 m, u64 base, u64 length, typename Reader::Part& part) const {
      Reader::template load<whole>(all.rows[m] + place, codes, base, length, part);
    }
    TOPKUBE_DEVICE_MEMBER void add(u32 m, const typename Reader::Part& part, Quad (&sums)[tile_quads]) const {
      Reader::add(all.weights[m], part, sums);
    }
  };
  TOPKUBE_DEVICE_MEMBER Messages find(u32 i) const {
    return {{}, *this, parts.places[i], QuantisedLayout(parts.lengths[i], bits).codes, count};
  }
};
static_assert(sizeof(IntegerRows<8>) + 64 <= 4096);

}  // namespace topkube
