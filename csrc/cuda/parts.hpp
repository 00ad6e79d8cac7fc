// What the kernels of signs and integers share: messages at any address, groups of four elements, and sums of many messages.
#pragma once

#include "../cpu/dtype.hpp"
#include "block_reduce.hpp"

namespace topkube {

constexpr u32 unpack_threads = 256;
constexpr u32 most_parts = 128;  // messages that one launch adds: their addresses are arguments of the kernel, at most 4 KiB
constexpr u32 quad = 4;          // elements of one load of 16 bytes

// Messages may begin at any byte. The branches of these functions are the same for all threads of a message.
TOPKUBE_DEVICE u32 load_word(const std::uint8_t* from) {
  const auto place = reinterpret_cast<std::uintptr_t>(from);
  if (place % 4 == 0) return *reinterpret_cast<const u32*>(from);
  if (place % 2 == 0) {
    const auto* halves = reinterpret_cast<const u16*>(from);
    return u32{halves[0]} | u32{halves[1]} << 16;
  }
  return u32{from[0]} | u32{from[1]} << 8 | u32{from[2]} << 16 | u32{from[3]} << 24;
}
TOPKUBE_DEVICE void store_half(std::uint8_t* to, u32 half) {
  if (reinterpret_cast<std::uintptr_t>(to) % 2 == 0) {
    *reinterpret_cast<u16*>(to) = static_cast<u16>(half);
  } else {
    to[0] = static_cast<std::uint8_t>(half);
    to[1] = static_cast<std::uint8_t>(half >> 8);
  }
}
TOPKUBE_DEVICE void store_word(std::uint8_t* to, u32 word) {
  if (reinterpret_cast<std::uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<u32*>(to) = word;
  } else {
    store_half(to, word & 0xffffu);
    store_half(to + 2, word >> 16);
  }
}
TOPKUBE_DEVICE u16 load_half(const std::uint8_t* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % 2 == 0) return *reinterpret_cast<const u16*>(from);
  return static_cast<u16>(u32{from[0]} | u32{from[1]} << 8);
}

struct alignas(16) Quad {
  float items[quad];
};

constexpr u32 table_parts = 56;  // parts of an array that one launch packs or adds: with the messages, arguments of at most 4 KiB

// Parts of an array, as an argument of a kernel that works on all of them. The units of work of all parts have numbers one after
// another.
struct PartTable {
  u64 starts[table_parts], lengths[table_parts];
  u64 ends[table_parts];  // the number of units up to the end of the part
  u32 count;

  constexpr u64 units() const { return ends[count - 1]; }

  // Returns the part to which a unit belongs, and turns `unit` into its number in the part.
  TOPKUBE_DEVICE_MEMBER u32 find(u64& unit) const {
    u32 low = 0, high = count - 1;
    while (low < high) {
      const u32 middle = (low + high) / 2;
      if (unit < ends[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    if (low) unit -= ends[low - 1];
    return low;
  }
};

// Returns the elements i to i + 3; elements from `length` on are 0. `aligned`: x is aligned to 16 bytes.
TOPKUBE_DEVICE Quad load_quad(const float* x, u64 i, u64 length, bool aligned) {
  if (aligned && i + quad <= length) return *reinterpret_cast<const Quad*>(x + i);
  Quad loaded;
#pragma unroll
  for (u32 j = 0; j < quad; ++j) loaded.items[j] = i + j < length ? x[i + j] : 0.0f;
  return loaded;
}
TOPKUBE_DEVICE void store_quad(float* x, u64 i, u64 length, bool aligned, const Quad& stored) {
  if (aligned && i + quad <= length) {
    *reinterpret_cast<Quad*>(x + i) = stored;
    return;
  }
#pragma unroll
  for (u32 j = 0; j < quad; ++j) {
    if (i + j < length) x[i + j] = stored.items[j];
  }
}

// Sets *flag to 0 if the scale of a block is NaN or infinite.
TOPKUBE_DEVICE void note_scale(u32* flag, u32 scale) {
  if (!is_finite_bf16(scale)) gpu::publish(flag, 0u);
}

// More messages than one launch adds are added by several launches. Between them, `sums` has the sums so far.
struct Progress {
  float* sums;
  bool is_first, is_last;
};

// Loads words that are `stride` bytes apart. The branches are the same for all threads of a message, if `stride` and the distance
// between threads are multiples of 4.
template <u32 count>
TOPKUBE_DEVICE void load_words(const std::uint8_t* from, u32 stride, u32 (&words)[count]) {
  if (reinterpret_cast<std::uintptr_t>(from) % 4 == 0) {
#pragma unroll
    for (u32 c = 0; c < count; ++c) words[c] = *reinterpret_cast<const u32*>(from + c * stride);
  } else {
#pragma unroll
    for (u32 c = 0; c < count; ++c) words[c] = load_word(from + c * stride);
  }
}

// A warp adds tiles of two blocks. A lane has several quads of a tile, whose places depend on the format of the messages.
constexpr u32 tile_quads = 4, tile_elements = 32 * quad * tile_quads, tile_blocks = 2, scale_block = tile_elements / tile_blocks;

// Loads or stores this lane's quads of a tile. `whole`: all elements of the tile exist, and `x` is aligned to 16 bytes.
template <bool whole, class Messages>
TOPKUBE_DEVICE void load_tile(const float* x, u64 base, u64 length, Quad (&quads)[tile_quads]) {
#pragma unroll
  for (u32 c = 0; c < tile_quads; ++c) {
    const u64 i = base + Messages::lane_position();
    if constexpr (whole) {
      quads[c] = *reinterpret_cast<const Quad*>(x + i + Messages::quad_offset(c));
    } else {
      quads[c] = load_quad(x, i + Messages::quad_offset(c), length, false);
    }
  }
}
template <bool whole, class Messages>
TOPKUBE_DEVICE void store_tile(float* x, u64 base, u64 length, const Quad (&quads)[tile_quads]) {
#pragma unroll
  for (u32 c = 0; c < tile_quads; ++c) {
    const u64 i = base + Messages::lane_position();
    if constexpr (whole) {
      *reinterpret_cast<Quad*>(x + i + Messages::quad_offset(c)) = quads[c];
    } else {
      store_quad(x, i + Messages::quad_offset(c), length, false, quads[c]);
    }
  }
}

// Adds what the messages send of the tile whose first element is `base`.
template <bool whole, class Messages>
TOPKUBE_DEVICE void add_tile(float* values, u64 base, u64 length, const Messages& messages, const Progress& progress) {
  Quad held[tile_quads], sums[tile_quads] = {};
  if (progress.is_last) load_tile<whole, Messages>(values, base, length, held);
  if (!progress.is_first) load_tile<whole, Messages>(progress.sums, base, length, sums);
  constexpr u32 ahead = Messages::ahead;
  for (u32 first = 0; first < messages.count; first += ahead) {
    typename Messages::Part parts[ahead];
#pragma unroll
    for (u32 a = 0; a < ahead; ++a) {
      if (first + a < messages.count) messages.template load<whole>(first + a, base, length, parts[a]);
    }
#pragma unroll
    for (u32 a = 0; a < ahead; ++a) {
      if (first + a < messages.count) messages.add(first + a, parts[a], sums);
    }
  }
  if (!progress.is_last) {
    store_tile<whole, Messages>(progress.sums, base, length, sums);
    return;
  }
#pragma unroll
  for (u32 c = 0; c < tile_quads; ++c) {
#pragma unroll
    for (u32 j = 0; j < quad; ++j) held[c].items[j] = canonical(gpu::plus(held[c].items[j], sums[c].items[j]));
  }
  store_tile<whole, Messages>(values, base, length, held);
}

// values += the sum of the messages. `aligned`: `values` is aligned to 16 bytes. The sum of an element is computed in the order of the messages, and added at the end, as in
// csrc/cpu. `Messages` has
//   count               the number of messages
//   blocks              how many blocks of the kernel a multiprocessor has room for
//   lane_position()     the position in a tile of this lane's first quad
//   quad_offset(c)      how far from there quad c is
//   Part, ahead         what a lane loads of a message for one tile, and how many messages it loads before it adds the first
//   load(m, base, ...)  loads the part of message m about the tile at element `base`
//   add(m, part, sums)  adds to `sums` what that part sends
template <class Messages>
TOPKUBE_KERNEL(unpack_threads, Messages::blocks) unpack_add(float* values, u64 length, bool aligned, Messages messages,
                                                            Progress progress) {
  const u64 stride = u64{gpu::blocks()} * (gpu::threads() / 32) * tile_elements;
  for (u64 base = (u64{gpu::block()} * (gpu::threads() / 32) + gpu::warp()) * tile_elements; base < length; base += stride) {
    if (aligned && base + tile_elements <= length) {
      add_tile<true>(values, base, length, messages, progress);
    } else {
      add_tile<false>(values, base, length, messages, progress);
    }
  }
}

// Does the same for parts of `values`, of which each row of `rows` has a message: `rows.find(i)` returns those about part i of
// `rows.parts`. The sums are complete after this launch.
template <class Rows>
TOPKUBE_KERNEL(unpack_threads, Rows::blocks) unpack_add_parts(float* values, Rows rows) {
  const u64 stride = u64{gpu::blocks()} * (gpu::threads() / 32);
  for (u64 unit = u64{gpu::block()} * (gpu::threads() / 32) + gpu::warp(); unit < rows.parts.units(); unit += stride) {
    u64 tile = unit;
    const u32 i = rows.parts.find(tile);
    float* part = values + rows.parts.starts[i];
    const u64 base = tile * tile_elements, length = rows.parts.lengths[i];
    const bool aligned = reinterpret_cast<std::uintptr_t>(part) % sizeof(Quad) == 0;
    if (aligned && base + tile_elements <= length) {
      add_tile<true>(part, base, length, rows.find(i), Progress{nullptr, true, true});
    } else {
      add_tile<false>(part, base, length, rows.find(i), Progress{nullptr, true, true});
    }
  }
}

}  // namespace topkube
