// 3 bits per element on the GPU: seven levels, in units of groups of 32 elements. csrc/cpu/quantised/quantised.hpp describes the
// messages, which have the same bits as on the CPU.
#pragma once

#include "../cpu/quantised/layout.hpp"
#include "../cpu/quantised/seven_levels.hpp"
#include "parts.hpp"

namespace topkube {

// Returns the code of `item`, and replaces `item` by what is not sent. Nothing is sent with a scale of 0 or NaN, which is then the
// unit.
TOPKUBE_DEVICE u32 quantise_to_level(float& item, float unit, bool is_sent) {
  const u32 from = bits_of(item);
  const float magnitude = float_of(from & magnitude_bits);
  u32 code = 0;
#pragma unroll
  for (u32 i = 0; i < 3; ++i) code += is_sent && magnitude > gpu::times(limit_above_level(i), unit) ? 1u : 0u;
  const u32 sign = is_sent ? from & ~magnitude_bits : 0u;
  item = canonical(gpu::minus(item, gpu::times(float_of(bits_of(level_of(code)) | sign), unit)));
  return code ? code | sign >> 29 : 0u;
}

// Returns the exponent of a group of 32 elements whose largest magnitude is `largest`.
TOPKUBE_DEVICE u32 find_level_exponent(float largest, float scale) {
  u32 exponent = 0;
#pragma unroll
  for (u32 e = 1; e <= last_exponent; ++e) {
    exponent += largest <= gpu::times(gpu::times(scale, level_fraction(e)), level_bound) ? 1u : 0u;
  }
  return exponent;
}

// Packs one block of 256 elements with seven levels: lane i has the elements 4 i to 4 i + 3 of both halves, so eight lanes have a
// group. `to` is the place of the block's exponents, and `rest` the number of elements from the start of the block on.
constexpr u32 quads_of_block = 2, group_lanes = 8;
TOPKUBE_DEVICE void pack_levels(Quad (&items)[quads_of_block], float scale, bool is_sent, u64 rest, std::uint8_t* to) {
  const u32 lane = gpu::lane(), groups = rest < quantised_block ? static_cast<u32>((rest + level_group - 1) / level_group) : 8u;
  std::uint8_t* planes = to + (groups + 1) / 2;
  u32 exponents = 0;
#pragma unroll
  for (u32 q = 0; q < quads_of_block; ++q) {
    u32 largest = 0;
#pragma unroll
    for (u32 j = 0; j < quad; ++j) {
      const u32 magnitude = bits_of(items[q].items[j]) & magnitude_bits;
      largest = magnitude > largest ? magnitude : largest;
    }
#pragma unroll
    for (u32 distance = 1; distance < group_lanes; distance *= 2) {
      const u32 other = gpu::shuffle_xor(largest, distance);
      largest = other > largest ? other : largest;
    }
    const u32 group = 32 / group_lanes * q + lane / group_lanes;
    const u32 exponent = is_sent ? find_level_exponent(float_of(largest), scale) : 0u;
    const float unit = gpu::times(scale, level_fraction(exponent));
    if (group < groups) exponents |= exponent << 4 * group;
    u32 words[level_planes] = {};
#pragma unroll
    for (u32 j = 0; j < quad; ++j) {
      const u32 code = quantise_to_level(items[q].items[j], unit, is_sent);
#pragma unroll
      for (u32 p = 0; p < level_planes; ++p) words[p] |= (code >> p & 1u) << (lane % group_lanes * quad + j);
    }
#pragma unroll
    for (u32& word : words) {
#pragma unroll
      for (u32 distance = 1; distance < group_lanes; distance *= 2) word |= gpu::shuffle_xor(word, distance);
    }
    if (lane % group_lanes == 0 && group < groups) {
#pragma unroll
      for (u32 p = 0; p < level_planes; ++p) store_word(planes + level_group_bytes * group + sizeof(u32) * p, words[p]);
    }
  }
  exponents |= gpu::shuffle_xor(exponents, 8u);
  exponents |= gpu::shuffle_xor(exponents, 16u);
  if (lane < (groups + 1) / 2) to[lane] = static_cast<std::uint8_t>(exponents >> 8 * lane);
}

// How a lane reads and adds a message of seven levels. Its quads are the same as with 4 bits: four lanes share a group.
struct LevelReader {
  static constexpr u32 blocks = 3, ahead = 1;  // with two ahead, a lane has too few registers
  struct Part {
    u32 scales[tile_blocks];  // the exponent of the group is in the upper 16 bits
    u32 planes[tile_blocks][level_planes];
  };
  TOPKUBE_DEVICE_MEMBER static u32 lane_position() { return gpu::lane() / 4 * 32 + gpu::lane() % 4 * quad; }
  static constexpr u32 quad_offset(u32 c) { return c / 2 * quantised_block + c % 2 * 16; }

  template <bool whole>
  TOPKUBE_DEVICE_MEMBER static void load(const std::uint8_t* message, u64 codes, u64 base, u64 length, Part& part) {
    const u32 group = gpu::lane() / 4;
#pragma unroll
    for (u32 b = 0; b < tile_blocks; ++b) {
      const u64 start = base + b * quantised_block;
      part.scales[b] = 0;
#pragma unroll
      for (u32 p = 0; p < level_planes; ++p) part.planes[b][p] = 0;
      if (!whole && start + level_group * group >= length) continue;
      const u32 groups =
          whole || length - start >= quantised_block ? 8u : static_cast<u32>((length - start + level_group - 1) / level_group);
      const std::uint8_t* from = message + codes + quantised_code_bytes(start, 3);
      part.scales[b] = load_half(message + start / quantised_block * 2) | (u32{from[group / 2]} >> group % 2 * 4 & 15u) << 16;
      load_words(from + (groups + 1) / 2 + level_group_bytes * group, sizeof(u32), part.planes[b]);
    }
  }

  TOPKUBE_DEVICE_MEMBER static void add(float weight, const Part& part, Quad (&sums)[tile_quads]) {
#pragma unroll
    for (u32 c = 0; c < tile_quads; ++c) {
      const u32 b = c * tile_blocks / tile_quads;
      const float scale = gpu::times(from_bf16(static_cast<u16>(part.scales[b])), weight);
      const float unit = gpu::times(scale, level_fraction(part.scales[b] >> 16));
#pragma unroll
      for (u32 j = 0; j < quad; ++j) {
        const u32 place = gpu::lane() % 4 * quad + c % 2 * 16 + j;
        u32 code = 0;
#pragma unroll
        for (u32 p = 0; p < level_planes; ++p) code |= (part.planes[b][p] >> place & 1u) << p;
        sums[c].items[j] = gpu::plus(sums[c].items[j], gpu::times(level_of(code), unit));
      }
    }
  }
};

}  // namespace topkube
