#include "cpu/wire/wire.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "cpu/elements.hpp"
#include "cpu/float_state.hpp"
#include "cpu/paths/path.hpp"

namespace topkube {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian");

constexpr std::size_t batch = 1024;  // entries converted at a time
constexpr std::size_t ahead = 24;    // entries between a prefetch and its use

// Reads from and writes to buffers that may be unaligned.
template <class T>
T read(const std::uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class T>
void write(std::uint8_t* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// Where the sections of a buffer begin.
struct Sections {
  const std::uint8_t *counts, *offsets, *values;
  Sections(const std::uint8_t* buffer, const WireHeader& header)
      : counts(buffer + wire_header_bytes),
        offsets(counts + 4 * wire_blocks(header.length)),
        values(offsets + wire_offsets_bytes(header.entries)) {}
};

// Converts the values of entries [start, start + size) to fp32, through an aligned copy.
void widen_values(const std::uint8_t* values, Dtype wire, std::size_t start, std::size_t size, float* out) {
  alignas(64) std::uint8_t aligned[batch * sizeof(float)];
  std::memcpy(aligned, values + start * item_size(wire), size * item_size(wire));
  active_path().widen[code_of(wire)](out, aligned, size);
}

// Calls entry(number, index) for all entries in order.
template <class Entry>
void for_each_index(const Sections& sections, const WireHeader& header, const Entry& entry) {
  std::size_t number = 0;
  for (std::size_t block = 0; block < wire_blocks(header.length); ++block) {
    const std::size_t end = number + read<std::uint32_t>(sections.counts + 4 * block);
    const auto base = static_cast<std::uint32_t>(block << wire_block_bits);
    for (; number < end; ++number) entry(number, base + read<std::uint16_t>(sections.offsets + 2 * number));
  }
}

// Checks the entries per block, the offsets, and their padding. Every count is checked before an offset is read.
WireFault check_offsets(const Sections& sections, const WireHeader& header) {
  const std::size_t blocks = wire_blocks(header.length);
  std::size_t total = 0;
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::size_t count = read<std::uint32_t>(sections.counts + 4 * block);
    if (count > std::min(wire_block_size, header.length - (block << wire_block_bits))) return WireFault::counts;
    total += count;
  }
  if (total != header.entries) return WireFault::counts;

  std::size_t number = 0;
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::size_t count = read<std::uint32_t>(sections.counts + 4 * block);
    const std::uint8_t* offsets = sections.offsets + 2 * number;
    unsigned disorder = 0;
    for (std::size_t i = 1; i < count; ++i) {
      disorder |= read<std::uint16_t>(offsets + 2 * i) <= read<std::uint16_t>(offsets + 2 * (i - 1));
    }
    if (disorder) return WireFault::order;
    if (count && (block << wire_block_bits) + read<std::uint16_t>(offsets + 2 * (count - 1)) >= header.length)
      return WireFault::order;
    number += count;
  }

  for (const std::uint8_t* pad = sections.offsets + 2 * std::size_t{header.entries}; pad < sections.values; ++pad) {
    if (*pad) return WireFault::padding;
  }
  return WireFault::none;
}

template <class T>
void add_entries(void* dense, const std::uint32_t* indices, const float* values, std::size_t count) {
  auto* to = static_cast<typename T::Item*>(dense);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + ahead < count) __builtin_prefetch(to + indices[i + ahead], 1);
    to[indices[i]] = T::round(canonical(T::load(to[indices[i]]) + values[i]));
  }
}

void add_batch(void* dense, Dtype dtype, const std::uint32_t* indices, const float* values, std::size_t count) {
  switch (dtype) {
    case Dtype::f32: return add_entries<F32>(dense, indices, values, count);
    case Dtype::bf16: return add_entries<BF16>(dense, indices, values, count);
    case Dtype::f16: return add_entries<F16>(dense, indices, values, count);
  }
}

// Writes the values, rounded to the wire type. Adds the error of each value to the residual, if there is one.
void encode_rounded_values(const std::uint32_t* indices, const void* values, Dtype dtype, std::size_t count, Dtype wire,
                           float* residual, std::uint8_t* to) {
  const PathKernels& path = active_path();
  alignas(64) float exact[batch], sent[batch];
  alignas(64) std::uint8_t rounded[batch * sizeof(float)];
  for (std::size_t start = 0; start < count; start += batch) {
    const std::size_t size = std::min(batch, count - start);
    path.widen[code_of(dtype)](exact, static_cast<const std::uint8_t*>(values) + start * item_size(dtype), size);
    path.narrow[code_of(wire)](rounded, exact, size, 1.0f);
    std::memcpy(to + start * item_size(wire), rounded, size * item_size(wire));
    if (!residual || wire == Dtype::f32) continue;
    path.widen[code_of(wire)](sent, rounded, size);
    for (std::size_t i = 0; i < size; ++i) {
      const float error = exact[i] - sent[i];
      if (error == 0.0f) continue;
      float& left = residual[indices[start + i]];
      left = canonical(left + error);
    }
  }
}

}  // namespace

std::size_t find_disorder(const std::uint32_t* indices, std::size_t count, std::size_t length) {
  if (count == 0) return 0;
  unsigned disorder = 0;
  for (std::size_t i = 1; i < count; ++i) disorder |= indices[i] <= indices[i - 1];
  if (!disorder && indices[count - 1] < length) return count;

  if (indices[0] >= length) return 0;  // the position is searched only after the fast check has failed
  std::size_t i = 1;
  while (indices[i] > indices[i - 1] && indices[i] < length) ++i;
  return i;
}

void encode(const std::uint32_t* indices, const void* values, Dtype dtype, std::size_t count, std::size_t length, Dtype wire,
            float* residual, std::uint8_t* out) {
  const IeeeScope ieee;
  std::memset(out, 0, wire_header_bytes);
  write(out, wire_magic);
  out[4] = wire_version;
  out[5] = static_cast<std::uint8_t>(wire);
  write(out + 8, static_cast<std::uint32_t>(length));
  write(out + 12, static_cast<std::uint32_t>(count));

  std::uint8_t* to = out + wire_header_bytes;
  const std::uint32_t* next = indices;
  for (std::size_t block = 0; block < wire_blocks(length); ++block, to += 4) {
    const std::uint64_t end = std::uint64_t{block + 1} << wire_block_bits;
    const std::uint32_t* block_end = std::lower_bound(next, indices + count, end);
    write(to, static_cast<std::uint32_t>(block_end - next));
    next = block_end;
  }
  for (std::size_t i = 0; i < count; ++i) write(to + 2 * i, static_cast<std::uint16_t>(indices[i]));
  std::memset(to + 2 * count, 0, wire_offsets_bytes(count) - 2 * count);
  to += wire_offsets_bytes(count);

  if (wire != dtype) {
    encode_rounded_values(indices, values, dtype, count, wire, residual, to);
  } else if (count) {
    std::memcpy(to, values, count * item_size(wire));
  }
}

WireHeader check_wire(const std::uint8_t* buffer, std::size_t bytes) {
  WireHeader header;
  const auto with_fault = [&header](WireFault fault) {
    header.fault = fault;
    return header;
  };
  if (bytes < wire_header_bytes) return with_fault(WireFault::too_short);
  if (read<std::uint32_t>(buffer) != wire_magic) return with_fault(WireFault::foreign);
  if (buffer[4] != wire_version) return with_fault(WireFault::version);
  if (buffer[5] > 2) return with_fault(WireFault::value_type);
  if (read<std::uint16_t>(buffer + 6) != 0) return with_fault(WireFault::padding);
  header.wire = static_cast<Dtype>(buffer[5]);
  header.length = read<std::uint32_t>(buffer + 8);
  header.entries = read<std::uint32_t>(buffer + 12);
  if (bytes != encoded_size(header.length, header.entries, header.wire)) return with_fault(WireFault::size);
  return with_fault(check_offsets(Sections(buffer, header), header));
}

void decode(const std::uint8_t* buffer, const WireHeader& header, std::uint32_t* indices, float* values) {
  const IeeeScope ieee;
  const Sections sections(buffer, header);
  for_each_index(sections, header, [&](std::size_t number, std::uint32_t index) { indices[number] = index; });
  for (std::size_t start = 0; start < header.entries; start += batch) {
    widen_values(sections.values, header.wire, start, std::min<std::size_t>(batch, header.entries - start), values + start);
  }
}

bool decode_add(const std::uint8_t* buffer, const WireHeader& header, void* dense, Dtype dtype, float scale) {
  const IeeeScope ieee;
  const Sections sections(buffer, header);
  std::uint32_t indices[batch];
  alignas(64) float values[batch];
  bool finite = true;
  std::size_t filled = 0, start = 0;
  const auto add = [&] {
    widen_values(sections.values, header.wire, start, filled, values);
    finite = finite && active_path().is_finite[code_of(Dtype::f32)](values, filled);
    for (std::size_t i = 0; i < filled; ++i) values[i] *= scale;
    add_batch(dense, dtype, indices, values, filled);
    start += filled;
    filled = 0;
  };
  for_each_index(sections, header, [&](std::size_t, std::uint32_t index) {
    indices[filled++] = index;
    if (filled == batch) add();
  });
  if (filled) add();
  return finite;
}

std::size_t find_out_of_range(const std::uint32_t* indices, std::size_t count, std::size_t length) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, indices[i]);
  if (count == 0 || largest < length) return count;
  return static_cast<std::size_t>(std::find_if(indices, indices + count, [length](std::uint32_t i) { return i >= length; }) -
                                  indices);
}

void scatter_add(void* dense, Dtype dtype, const std::uint32_t* indices, const void* values, Dtype value_dtype, std::size_t count) {
  const IeeeScope ieee;
  if (value_dtype == Dtype::f32) {
    add_batch(dense, dtype, indices, static_cast<const float*>(values), count);
    return;
  }
  alignas(64) float widened[batch];
  for (std::size_t start = 0; start < count; start += batch) {
    const std::size_t size = std::min(batch, count - start);
    active_path().widen[code_of(value_dtype)](widened, static_cast<const std::uint16_t*>(values) + start, size);
    add_batch(dense, dtype, indices + start, widened, size);
  }
}

}  // namespace topkube
