// One bit per element on the GPU: the same scales, bits and remainders as csrc/cpu/sign/sign.hpp, which describes the format.
#pragma once

#include "../cpu/sign/layout.hpp"
#include "parts.hpp"

namespace topkube {

constexpr u32 sign_threads = 256, sign_blocks = 5, sign_bit = 0x80000000u;

// Half a warp packs one block of 256 elements, and each lane has one of its sixteen running sums (csrc/cpu/paths/sign_loops.hpp).
// The elements stay in registers between the sum and the subtraction, so memory is read and written once.
TOPKUBE_DEVICE void pack_pair(float* values, u64 length, std::uint8_t* scales, std::uint8_t* bits, u32* flag, u64 pair) {
  constexpr u32 rows = sign_block / 16;
  const u64 blocks = (length + sign_block - 1) / sign_block;
  const u32 half = gpu::lane() / 16, column = gpu::lane() & 15u;
  const u64 block = 2 * pair + half, base = block * sign_block + column;
  float items[rows];
#pragma unroll
  for (u32 row = 0; row < rows; ++row) items[row] = base + 16 * row < length ? values[base + 16 * row] : 0.0f;
  float sum = 0;
  u32 own = 0;  // the signs of row number `column`
#pragma unroll
  for (u32 row = 0; row < rows; ++row) {
    sum = gpu::plus(sum, float_of(bits_of(items[row]) & magnitude_bits));
    const u32 signs = gpu::ballot((bits_of(items[row]) & sign_bit) != 0);
    if (row == column) own = signs >> (16 * half) & 0xffffu;
  }
  for (u32 mask = 8; mask; mask /= 2) sum = gpu::plus(sum, gpu::shuffle_xor(sum, mask));
  if (block >= blocks) return;  // no operation of the warp about this pair comes after this
  const u64 in_block = length - block * sign_block < sign_block ? length - block * sign_block : sign_block;
  const float mean = gpu::divide(sum, static_cast<float>(in_block));
  const u32 scale = mean == mean ? to_bf16(mean) : 0x7fc0u;
#pragma unroll
  for (u32 row = 0; row < rows; ++row) {
    const float sent = float_of(scale << 16 | (bits_of(items[row]) & sign_bit));
    if (base + 16 * row < length) values[base + 16 * row] = canonical(gpu::minus(items[row], sent));
  }
  const u64 first = block * sign_block + 16 * column;  // the element of the first of its bits
  if (first + 8 < length) {
    store_half(bits + first / 8, own);
  } else if (first < length) {
    bits[first / 8] = static_cast<std::uint8_t>(own);
  }
  if (column == 0) {
    store_half(scales + 2 * block, scale);
    note_scale(flag, scale);
  }
}

TOPKUBE_KERNEL(sign_threads, sign_blocks) pack_signs(float* values, u64 length, std::uint8_t* scales, std::uint8_t* bits,
                                                     u32* flag) {
  const u64 pairs = (length + 2 * sign_block - 1) / (2 * sign_block), warps = u64{gpu::blocks()} * (gpu::threads() / 32);
  for (u64 pair = u64{gpu::block()} * (gpu::threads() / 32) + gpu::warp(); pair < pairs; pair += warps) {
    pack_pair(values, length, scales, bits, flag, pair);
  }
}

// Parts of an array, and the bytes of a message at which the scales and the signs of each begin. Units are pairs of blocks.
struct SignTable : PartTable {
  u64 scales[table_parts], bits[table_parts];
};

TOPKUBE_KERNEL(sign_threads, sign_blocks) pack_signs_of_parts(float* values, std::uint8_t* message, SignTable parts, u32* flag) {
  const u64 warps = u64{gpu::blocks()} * (gpu::threads() / 32);
  for (u64 unit = u64{gpu::block()} * (gpu::threads() / 32) + gpu::warp(); unit < parts.units(); unit += warps) {
    u64 pair = unit;
    const u32 i = parts.find(pair);
    pack_pair(values + parts.starts[i], parts.lengths[i], message + parts.scales[i], message + parts.bits[i], flag, pair);
  }
}

// How a lane reads and adds a message of signs (see `unpack_add`).
struct SignReader {
  static_assert(scale_block == sign_block && tile_elements == 2 * sign_block);
  static constexpr u32 blocks = 4, ahead = 2;
  struct Part {
    u32 scales[tile_blocks], signs[tile_quads];
  };
  TOPKUBE_DEVICE_MEMBER static u32 lane_position() { return gpu::lane() * quad; }
  static constexpr u32 quad_offset(u32 c) { return 32 * quad * c; }

  template <bool whole>
  TOPKUBE_DEVICE_MEMBER static void load(const u16* scales, const std::uint8_t* bits, u64 base, u64 length, Part& part) {
    const u16* scale = scales + base / sign_block;
    const std::uint8_t* byte = bits + base / 8 + gpu::lane() / 2;
#pragma unroll
    for (u32 c = 0; c < tile_quads; ++c) {
      part.signs[c] = whole || base + lane_position() + quad_offset(c) < length ? byte[quad_offset(c) / 8] : 0u;
    }
#pragma unroll
    for (u32 b = 0; b < tile_blocks; ++b) part.scales[b] = whole || base + b * sign_block < length ? scale[b] : 0u;
  }

  TOPKUBE_DEVICE_MEMBER static void add(float weight, const Part& part, Quad (&sums)[tile_quads]) {
    const u32 to_the_top = gpu::lane() % 2 ? 24 : 28;  // a lane has half of a byte; the shift moves its last element to bit 31
#pragma unroll
    for (u32 c = 0; c < tile_quads; ++c) {
      const float weighted = gpu::times(from_bf16(static_cast<u16>(part.scales[c * tile_blocks / tile_quads])), weight);
      const u32 signs = part.signs[c] << to_the_top;
#pragma unroll
      for (u32 j = 0; j < quad; ++j) {
        const u32 sent = bits_of(weighted) ^ (signs << (quad - 1 - j) & sign_bit);
        sums[c].items[j] = gpu::plus(sums[c].items[j], float_of(sent));
      }
    }
  }
};

// The messages of nodes, as an argument of `unpack_add`.
struct SignMessages : SignReader {
  const u16* scales[most_parts];
  const std::uint8_t* bits[most_parts];
  float weights[most_parts];
  u32 count;

  template <bool whole>
  TOPKUBE_DEVICE_MEMBER void load(u32 m, u64 base, u64 length, Part& part) const {
    SignReader::load<whole>(scales[m], bits[m], base, length, part);
  }
  TOPKUBE_DEVICE_MEMBER void add(u32 m, const Part& part, Quad (&sums)[tile_quads]) const {
    SignReader::add(weights[m], part, sums);
  }
};

// The rows of nodes, as an argument of `unpack_add_parts`.
struct SignRows : SignReader {
  const std::uint8_t* rows[most_parts];
  float weights[most_parts];
  u32 count;
  SignTable parts;

  struct Messages : SignReader {
    const SignRows& all;
    u64 scales, bits;
    u32 count;

    template <bool whole>
    TOPKUBE_DEVICE_MEMBER void load(u32 m, u64 base, u64 length, Part& part) const {
      const auto* scale = reinterpret_cast<const u16*>(all.rows[m] + scales);
      SignReader::load<whole>(scale, all.rows[m] + bits, base, length, part);
    }
    TOPKUBE_DEVICE_MEMBER void add(u32 m, const Part& part, Quad (&sums)[tile_quads]) const {
      SignReader::add(all.weights[m], part, sums);
    }
  };
  TOPKUBE_DEVICE_MEMBER Messages find(u32 i) const { return {{}, *this, parts.scales[i], parts.bits[i], count}; }
};
static_assert(sizeof(SignRows) + 64 <= 4096);

}  // namespace topkube
