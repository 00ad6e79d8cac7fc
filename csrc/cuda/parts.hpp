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

// values += the sum of the messages. `Messages` has `count`, and `add(m, i, sums)` adds to `sums` what message m sends of the
// elements i to i + 3. The sum of an element is computed in the order of the messages, and added at the end, as in csrc/cpu. A
// thread starts the loads of several quads before it uses the first.
template <class Messages>
TOPKUBE_KERNEL(unpack_threads) unpack_add(float* values, u64 length, bool aligned, Messages messages, Progress progress) {
  constexpr u32 ahead = 2;
  const u64 stride = u64{gpu::blocks()} * gpu::threads() * quad;
  for (u64 start = (u64{gpu::block()} * gpu::threads() + gpu::thread()) * quad; start < length; start += ahead * stride) {
    Quad held[ahead], sums[ahead];
#pragma unroll
    for (u32 a = 0; a < ahead; ++a) {
      held[a] = progress.is_last ? load_quad(values, start + a * stride, length, aligned) : Quad{};
      sums[a] = progress.is_first ? Quad{} : load_quad(progress.sums, start + a * stride, length, true);
    }
#pragma unroll 2
    for (u32 m = 0; m < messages.count; ++m) {
#pragma unroll
      for (u32 a = 0; a < ahead; ++a) {
        if (start + a * stride < length) messages.add(m, start + a * stride, sums[a]);
      }
    }
#pragma unroll
    for (u32 a = 0; a < ahead; ++a) {
      if (!progress.is_last) {
        store_quad(progress.sums, start + a * stride, length, true, sums[a]);
        continue;
      }
#pragma unroll
      for (u32 j = 0; j < quad; ++j) held[a].items[j] = canonical(gpu::plus(held[a].items[j], sums[a].items[j]));
      store_quad(values, start + a * stride, length, aligned, held[a]);
    }
  }
}

}  // namespace topkube
