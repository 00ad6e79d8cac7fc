// The wire format of one sparse shard, and scatter-add.
//
//   0   magic "TKW1"           8  length u32 (elements of the dense shard)      24  entries per block, u32 each
//   4   version u8 = 1        12  entries u32 (k)                               ..  offsets in the block, u16 each,
//   5   value type u8         16  checksum u64: XXH3-64 of bytes 0..15              padded with zeros to 4 bytes
//   6   zero u16                  and 24..end (topkube/kernels/wire.py)         ..  values, fp32, bf16 or fp16
//
// A block has 65,536 elements; offsets ascend within it. All numbers are little-endian. The size follows from (length, k, value
// type), so a receiver can compute it in advance. A reader trusts nothing: it checks every count, offset and size before it
// writes anything.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.hpp"
#include "cpu/wire/layout.hpp"

namespace topkube {

// The faults of a buffer, in the order of the checks.
enum class WireFault : int {
  none = 0,
  too_short,  // no room for a header
  foreign,    // the magic is wrong: the buffer is not from TopKube
  version,
  value_type,
  size,     // the size does not follow from length, entries and value type
  counts,   // a block has more entries than elements, or the total is not `entries`
  order,    // offsets do not ascend, or one lies beyond the length
  padding,  // padding is not zero
};

struct WireHeader {
  WireFault fault = WireFault::none;
  std::uint32_t length = 0, entries = 0;
  Dtype wire = Dtype::f32;
};

inline std::size_t encoded_size(std::size_t length, std::size_t entries, Dtype wire) {
  return wire_bytes(length, entries, item_size(wire));
}

// Returns the position of the first index that does not ascend or is not below `length`, or `count` if all indices are valid.
std::size_t find_disorder(const std::uint32_t* indices, std::size_t count, std::size_t length);

// Writes encoded_size(...) bytes to `out`, with a checksum of zero. The indices ascend (see find_disorder). If `residual` (length
// floats) is not null, the rounding error of each value (value - rounded value) is added to the residual at its index.
void encode(const std::uint32_t* indices, const void* values, Dtype dtype, std::size_t count, std::size_t length, Dtype wire,
            float* residual, std::uint8_t* out);

// Checks everything in the buffer except the checksum. Returns the header, with the first fault.
WireHeader check_wire(const std::uint8_t* buffer, std::size_t bytes);

// These functions read a buffer that has passed check_wire. `decode` writes `entries` indices and fp32 values. `decode_add` adds
// value * scale to dense (length elements), rounded once if dense is 16-bit. It returns true if all values were finite.
void decode(const std::uint8_t* buffer, const WireHeader& header, std::uint32_t* indices, float* values);
bool decode_add(const std::uint8_t* buffer, const WireHeader& header, void* dense, Dtype dtype, float scale);

// Returns the position of the first index that is not below `length`, or `count` if all indices are valid.
std::size_t find_out_of_range(const std::uint32_t* indices, std::size_t count, std::size_t length);

// Adds values[i] to dense[indices[i]], in order. Each sum is rounded once to the type of dense. All indices are within bounds.
void scatter_add(void* dense, Dtype dtype, const std::uint32_t* indices, const void* values, Dtype value_dtype, std::size_t count);

}  // namespace topkube
