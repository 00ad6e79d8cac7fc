// The wire format of one sparse shard, and the scatter-add that ends its way.
//
//   0   magic "TKW1"           8  length u32 (elements of the dense shard)      24  entries per block, u32 each
//   4   version u8 = 1        12  entries u32 (k)                               ..  offsets in the block, u16 each,
//   5   value type u8         16  checksum u64: XXH3-64 of bytes 0..15              padded with zeros to 4 bytes
//   6   zero u16                  and 24..end (topkube/kernels.py)              ..  values, fp32, bf16 or fp16
//
// A block is 65,536 elements; offsets ascend in it. Little-endian. The size follows from (length, k, value type), so a receiver
// knows it beforehand. A reader believes nothing: every count, offset and size is checked before anything is written.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.hpp"

namespace topkube {

constexpr std::size_t wire_header = 24;

// What is wrong with a buffer, in the order of the checks.
enum class WireFault : int {
  none = 0,
  too_short,  // no room for a header
  foreign,    // not the magic
  version,
  value_type,
  size,       // not the size that length, entries and value type make
  counts,     // a block holds more entries than elements, or they do not add up
  order,      // offsets do not ascend, or one lies beyond the length
  padding,    // not zero
};

struct WireHeader {
  WireFault fault = WireFault::none;
  std::uint32_t length = 0, entries = 0;
  Dtype wire = Dtype::f32;
};

std::size_t encoded_size(std::size_t length, std::size_t entries, Dtype wire);

// The position of the first index that does not ascend or is not below `length`; `count` where all are fine.
std::size_t first_disorder(const std::uint32_t* indices, std::size_t count, std::size_t length);

// Writes encoded_size(...) bytes to `out`, checksum zero. The indices ascend (first_disorder). Where `residual` (length floats) is
// given, value - rounded value is added to it at each index whose value was not exact.
void encode(const std::uint32_t* indices, const void* values, Dtype dtype, std::size_t count, std::size_t length, Dtype wire,
            float* residual, std::uint8_t* out);

// The header, and whether everything in the buffer but the checksum is in order.
WireHeader check_wire(const std::uint8_t* buffer, std::size_t bytes);

// Both read a buffer that check_wire has passed. `decode` fills `entries` indices and fp32 values; `decode_add` adds value * scale
// to dense (length elements), rounding once where it is 16-bit, and returns whether all values were finite.
void decode(const std::uint8_t* buffer, const WireHeader& header, std::uint32_t* indices, float* values);
bool decode_add(const std::uint8_t* buffer, const WireHeader& header, void* dense, Dtype dtype, float scale);

// The position of the first index that is not below `length`; `count` where all are fine.
std::size_t first_beyond(const std::uint32_t* indices, std::size_t count, std::size_t length);

// dense[indices[i]] += values[i], in order, each sum rounded once to dense's type. All indices are within bounds.
void scatter_add(void* dense, Dtype dtype, const std::uint32_t* indices, const void* values, Dtype value_dtype,
                 std::size_t count);

}  // namespace topkube
