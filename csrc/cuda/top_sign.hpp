// The indices of the largest elements on the GPU: the same messages and sums as csrc/cpu/sign/top_sign.hpp, which describes the
// format. `topk` selects the elements, and `pack_signs` writes their scales and bits.
//
// Reading a message takes five kernels: count the bits of the unary part, place its tiles, read the indices, check them, add. If a
// check fails, it sets the flag to 0, and nothing is added.
#pragma once

#include "../cpu/sign/layout.hpp"
#include "parts.hpp"

namespace topkube {

constexpr u32 index_threads = 256, place_threads = 1024;
constexpr u32 words_per_thread = 8, tile_words = index_threads * words_per_thread;  // of the unary part
constexpr u32 octet = 8;

struct IndexShared {
  BlockScratch scratch;
};

// Returns a word whose highest byte is the first byte in memory: position p of the unary part is then bit 31 - p.
TOPKUBE_DEVICE u32 swap_bytes(u32 bits) { return bits << 24 | (bits & 0xff00u) << 8 | (bits >> 8 & 0xff00u) | bits >> 24; }

// Writes the planes and the unary part, and replaces the chosen elements of `values` by what is left of them (`left`).
TOPKUBE_KERNEL(index_threads)
write_indices(float* values, const u32* indices, const float* left, std::uint8_t* message, TopSignLayout layout) {
  const u64 first = u64{gpu::block()} * gpu::threads() + gpu::thread(), stride = u64{gpu::blocks()} * gpu::threads();
  const u64 bits_end = layout.bits + (layout.count + 7) / 8;
  if (bits_end + first < layout.planes) message[bits_end + first] = 0;
  for (u64 i = first; i < layout.count; i += stride) values[indices[i]] = left[i];

  for (u64 i = first; i * octet < layout.count; i += stride) {
    u32 eight[octet];
#pragma unroll
    for (u32 j = 0; j < octet; ++j) eight[j] = octet * i + j < layout.count ? indices[octet * i + j] : 0;
    for (u32 plane = 0; plane < layout.low; ++plane) {
      u32 byte = 0;
#pragma unroll
      for (u32 j = 0; j < octet; ++j) byte |= (eight[j] >> plane & 1u) << (7 - j);
      message[layout.planes + plane * layout.plane_bytes + i] = static_cast<std::uint8_t>(byte);
    }
  }

  const u64 length = layout.bytes - layout.unary;
  for (u64 word = first; 4 * word < length; word += stride) {
    const u64 from = 32 * word;
    u64 low = 0, high = layout.count;  // the first index whose bit is not before this word
    while (low < high) {
      const u64 middle = (low + high) / 2;
      if ((indices[middle] >> layout.low) + middle < from) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    u32 bits = 0;
    for (u64 i = low; i < layout.count; ++i) {
      const u64 place = (indices[i] >> layout.low) + i - from;
      if (place >= 32) break;
      bits |= u32{1} << (31 - place);
    }
    for (u32 j = 0; j < 4 && 4 * word + j < length; ++j) {
      message[layout.unary + 4 * word + j] = static_cast<std::uint8_t>(bits >> (24 - 8 * j));
    }
  }
}

// Returns a word of the unary part, with bit 31 - p for position 32 * word + p. Bits that do not exist are 0.
TOPKUBE_DEVICE u32 load_marks(const std::uint8_t* message, const TopSignLayout& layout, u64 word) {
  const std::uint8_t* from = message + layout.unary + 4 * word;
  if (32 * word + 32 <= layout.high) return swap_bytes(load_word(from));
  u32 bits = 0;
  for (u32 j = 0; j < 4 && 32 * word + 8 * j < layout.high; ++j) bits |= u32{from[j]} << (24 - 8 * j);
  return 32 * word < layout.high ? bits & ~(0xffffffffu >> (layout.high - 32 * word)) : 0;
}

// Counts the bits of each tile.
TOPKUBE_KERNEL(index_threads) count_marks(const std::uint8_t* message, TopSignLayout layout, u32* tiles) {
  auto& shared = gpu::shared<IndexShared>();
  u32 marks = 0;
  for (u32 j = 0; j < words_per_thread; ++j) {
    marks += gpu::popcount(load_marks(message, layout, u64{gpu::block()} * tile_words + j * index_threads + gpu::thread()));
  }
  marks = block_total(marks, shared.scratch);
  if (gpu::thread() == 0) tiles[gpu::block()] = marks;
}

// Runs as one block. Replaces the number of bits of each tile by the number of bits of all tiles before it, and checks the total.
TOPKUBE_KERNEL(place_threads) place_tiles(u32* tiles, u64 count, u64 expected, u32* flag) {
  auto& shared = gpu::shared<IndexShared>();
  u64 all = 0;
  for (u64 start = 0; start < count; start += gpu::threads()) {
    const u64 tile = start + gpu::thread();
    const u32 marks = tile < count ? tiles[tile] : 0, up_to_lane = sum_up_to_lane(marks);
    u64 sum;
    const u64 before_warp = sum_before_warp(gpu::shuffle(up_to_lane, 31u), shared.scratch, &sum);
    if (tile < count) tiles[tile] = static_cast<u32>(all + before_warp + (up_to_lane - marks));
    all += sum;
  }
  if (gpu::thread() == 0 && all != expected) gpu::publish(flag, 0u);
}

struct ReadShared {
  BlockScratch scratch;
  u16 places[index_threads / 32][32 * 32];  // of the bits in the row of each warp
};

// Writes the indices. If there are more bits than indices, it ignores the others. A warp reads rows of 32 words. It lists the places
// of a row's bits in shared memory, so that its lanes then write neighbouring indices.
TOPKUBE_KERNEL(index_threads)
read_indices(const std::uint8_t* message, TopSignLayout layout, const u32* tiles, u32* indices) {
  auto& shared = gpu::shared<ReadShared>();
  u16* places = shared.places[gpu::warp()];
  const u32 lane = gpu::lane();
  const u64 first = u64{gpu::block()} * tile_words + gpu::warp() * (32 * words_per_thread);
  u32 words[words_per_thread], marks = 0;
#pragma unroll
  for (u32 j = 0; j < words_per_thread; ++j) {
    words[j] = load_marks(message, layout, first + 32 * j + lane);
    marks += gpu::popcount(words[j]);
  }
  u64 sum;
  u64 number = tiles[gpu::block()] + sum_before_warp(gpu::warp_total(marks), shared.scratch, &sum);
#pragma unroll
  for (u32 j = 0; j < words_per_thread; ++j) {
    const u32 up_to_lane = sum_up_to_lane(gpu::popcount(words[j])), in_row = gpu::shuffle(up_to_lane, 31u);
    u16* end = places + up_to_lane;
    for (u32 left = words[j]; left; left &= left - 1) *--end = static_cast<u16>(32 * lane + 31 - gpu::first_bit(left));
    gpu::sync_warp();
    for (u32 i = lane; i < in_row && number + i < layout.count; i += 32) {
      const u64 entry = number + i;
      u32 index = static_cast<u32>(32 * (first + 32 * j) + places[i] - entry) << layout.low;
      for (u32 plane = 0; plane < layout.low; ++plane) {
        const u32 byte = message[layout.planes + plane * layout.plane_bytes + entry / octet];
        index |= (byte >> (7 - entry % octet) & 1u) << plane;
      }
      indices[entry] = index;
    }
    gpu::sync_warp();  // the next row overwrites the places
    number += in_row;
  }
}

// Sets *flag to 0 unless the indices ascend and are below the length.
TOPKUBE_KERNEL(index_threads) check_ascent(const u32* indices, u64 count, u64 length, u32* flag) {
  for (u64 i = u64{gpu::block()} * gpu::threads() + gpu::thread(); i < count; i += u64{gpu::blocks()} * gpu::threads()) {
    if (indices[i] >= length || (i > 0 && indices[i] <= indices[i - 1])) gpu::publish(flag, 0u);
  }
}

// Adds what is sent of each chosen element, unless a check failed.
TOPKUBE_KERNEL(index_threads)
add_signs(float* values, const u32* indices, const std::uint8_t* message, TopSignLayout layout, float weight, const u32* flag) {
  if (*flag == 0) return;
  for (u64 i = u64{gpu::block()} * gpu::threads() + gpu::thread(); i < layout.count; i += u64{gpu::blocks()} * gpu::threads()) {
    const u32 scale = bits_of(gpu::times(from_bf16(load_half(message + i / sign_block * 2)), weight));
    const u32 is_negative = u32{message[layout.bits + i / 8]} >> (i % 8) & 1u;
    const float sent = gpu::plus(0.0f, float_of(scale ^ is_negative << 31));  // a sum of one part, as on the CPU
    values[indices[i]] = canonical(gpu::plus(values[indices[i]], sent));
  }
}

}  // namespace topkube
