// The sizes of the wire format, for the CPU and the CUDA code. csrc/cpu/wire/wire.hpp describes the format.
//
// All functions are `static constexpr`, so that CUDA kernels can call them too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace topkube {

static constexpr std::uint32_t wire_magic = 0x31574b54u;  // "TKW1", little-endian
static constexpr std::uint8_t wire_version = 1;
static constexpr std::size_t wire_header_bytes = 24;
static constexpr std::size_t wire_block_bits = 16, wire_block_size = std::size_t{1} << wire_block_bits;  // elements

// Returns how many blocks a dense shard of `length` elements has.
static constexpr std::size_t wire_blocks(std::size_t length) { return (length + wire_block_size - 1) >> wire_block_bits; }

// Returns the bytes of the offsets of all entries, with their padding.
static constexpr std::size_t wire_offsets_bytes(std::size_t entries) { return (2 * entries + 3) / 4 * 4; }

// Returns the bytes of an encoded shard whose values have `value_bytes` bytes each.
static constexpr std::size_t wire_bytes(std::size_t length, std::size_t entries, std::size_t value_bytes) {
  return wire_header_bytes + 4 * wire_blocks(length) + wire_offsets_bytes(entries) + entries * value_bytes;
}

}  // namespace topkube
