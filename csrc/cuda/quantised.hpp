// 4 or 8 bits per element on the GPU: the same messages and remainders as csrc/cpu/quantised/quantised.hpp, which describes the
// format.
#pragma once

#include "../cpu/quantised/layout.hpp"
#include "../cpu/quantised/squares.hpp"
#include "parts.hpp"

namespace topkube {

constexpr u32 quantise_threads = 256;
// 1.5 * 2^23. The low bits of x + rounding_term are x, rounded to an integer.
constexpr float rounding_term = 12582912.0f;

// The scale of a block whose largest magnitude has the bits `largest`, and the factor that turns an element into its integer.
struct Step {
  float scale, inverse;
};
template <int bits>
TOPKUBE_DEVICE Step find_step(u32 largest) {
  const float step = gpu::divide(float_of(largest), bits == 8 ? 127.0f : 49.0f);
  const u32 rounded_up = (bits_of(step) + 0xffffu) & 0xffff0000u;
  if (largest >= infinity_bits) return {float_of(canonical_nan), 0.0f};
  if (rounded_up < smallest_normal_bits) return {0.0f, 0.0f};
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

// A warp packs one block of 256 elements: lane i has the elements 4 i to 4 i + 3 of both halves. They stay in registers between the
// search for the largest and the subtraction, so memory is read and written once.
template <int bits>
TOPKUBE_KERNEL(quantise_threads) pack_integers(float* values, u64 length, bool aligned, std::uint8_t* message,
                                               QuantisedLayout layout, u32* flag) {
  constexpr u32 quads = 2;
  const u64 blocks = (length + quantised_block - 1) / quantised_block, warps = u64{gpu::blocks()} * (gpu::threads() / 32);
  const u32 lane = gpu::lane();
  for (u64 block = u64{gpu::block()} * (gpu::threads() / 32) + gpu::warp(); block < blocks; block += warps) {
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
#pragma unroll
    for (u32 q = 0; q < quads; ++q) {
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
    if (block == blocks - 1 && layout.end + lane < layout.bytes) message[layout.end + lane] = 0;
  }
}

// The messages of nodes, as an argument of `unpack_add`.
template <int bits>
struct IntegerMessages {
  const std::uint8_t* messages[most_parts];
  float weights[most_parts];
  u64 codes, length;
  u32 count;

  TOPKUBE_DEVICE_MEMBER void add(u32 m, u64 i, Quad& sums) const {
    const float scale = gpu::times(from_bf16(load_half(messages[m] + i / quantised_block * 2)), weights[m]);
    u32 word = 0;  // an integer in each byte
    if constexpr (bits == 8) {
      const std::uint8_t* from = messages[m] + codes + i;
      if (i + quad <= length) {
        word = load_word(from);
      } else {
        for (u32 j = 0; i + j < length; ++j) word |= u32{from[j]} << (8 * j);
      }
    } else {
      word = load_word(messages[m] + codes + i / 32 * 16 + i % 16) << (i & 16u ? 0 : 4);  // the half that counts is the high one
    }
#pragma unroll
    for (u32 j = 0; j < quad; ++j) {
      const auto byte = static_cast<std::int8_t>(word >> (8 * j));
      const float value = bits == 8 ? static_cast<float>(byte) : signed_square(static_cast<float>(byte >> 4));
      sums.items[j] = gpu::plus(sums.items[j], gpu::times(value, scale));
    }
  }
};

}  // namespace topkube
