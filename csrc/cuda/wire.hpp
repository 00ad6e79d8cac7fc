// The wire codec and scatter-add on the GPU: the same bytes and sums as csrc/cpu/wire/wire.hpp, which describes the format.
//
// A verdict is a set of words on the device that start as ~0 (`VerdictWord`). Every kernel that writes a result reads the verdict
// of the checks before it, and writes nothing if a check failed.
#pragma once

#include "../cpu/dtype.hpp"
#include "../cpu/wire/layout.hpp"
#include "xxh3.hpp"

namespace topkube {

constexpr u32 wire_threads = 256, check_threads = 1024;
constexpr u32 no_fault = ~u32{0};

// The faults of csrc/cpu/wire/wire.hpp in the order of its checks, then the two that topkube/kernels/wire.py finds for the CPU. The
// smallest fault counts.
enum Fault : u32 { too_short = 1, foreign, version, value_type, size, counts, order, padding, checksum, other_length };

enum VerdictWord : u32 {
  fault_word = 0,      // encode, scatter_add: the position of the first invalid index; functions that decode: a Fault
  ascending_word = 1,  // scatter_add: 0 if indices do not ascend
  finite_word = 1,     // decode_add: 0 if a value is not finite
  entries_word = 2,
  length_word = 3,
  verdict_words = 4,
};

// Returns how many entries of `sorted` are below `limit`.
template <class T>
TOPKUBE_DEVICE u64 count_below(const T* sorted, u64 count, u64 limit) {
  u64 low = 0, high = count;
  while (low < high) {
    const u64 middle = (low + high) / 2;
    if (sorted[middle] < limit) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Checks that indices are below `length`, and that they ascend. Indices that do not ascend are a fault if `strictly`, and are noted
// in `ascending_word` otherwise.
TOPKUBE_KERNEL(wire_threads) check_indices(const u32* indices, u64 count, u64 length, bool strictly, u32* verdict) {
  for (u64 i = u64{gpu::block()} * gpu::threads() + gpu::thread(); i < count; i += u64{gpu::blocks()} * gpu::threads()) {
    const bool descends = i > 0 && indices[i] <= indices[i - 1];
    if (indices[i] >= length || (strictly && descends)) gpu::lower(verdict + fault_word, static_cast<u32>(i));
    if (!strictly && descends) gpu::publish(verdict + ascending_word, 0u);
  }
}

template <class T, class Wire>
TOPKUBE_KERNEL(wire_threads) encode_entries(const u32* indices, const typename T::Item* values, u64 count, u64 length,
                                            u32 wire_code, float* residual, std::uint8_t* out, const u32* verdict) {
  const u64 blocks = wire_blocks(length), stride = u64{gpu::blocks()} * gpu::threads();
  const u64 first = u64{gpu::block()} * gpu::threads() + gpu::thread();
  auto* header = reinterpret_cast<u32*>(out);
  if (verdict[fault_word] != no_fault) {
    if (first == 0) header[0] = 0;  // invalidates a valid buffer that the memory may still hold
    return;
  }
  if (first == 0) {
    header[0] = wire_magic;
    header[1] = wire_version | wire_code << 8;
    header[2] = static_cast<u32>(length);
    header[3] = static_cast<u32>(count);
  }
  for (u64 block = first; block < blocks; block += stride) {
    header[wire_header_bytes / 4 + block] = static_cast<u32>(count_below(indices, count, (block + 1) << wire_block_bits) -
                                                             count_below(indices, count, block << wire_block_bits));
  }
  std::uint8_t* offsets = out + wire_header_bytes + 4 * blocks;
  auto* to = reinterpret_cast<typename Wire::Item*>(offsets + wire_offsets_bytes(count));
  if (first == 0 && count % 2) reinterpret_cast<u16*>(offsets)[count] = 0;
  for (u64 i = first; i < count; i += stride) {
    reinterpret_cast<u16*>(offsets)[i] = static_cast<u16>(indices[i]);
    if constexpr (std::is_same_v<T, Wire>) {
      to[i] = values[i];
    } else {
      const float exact = canonical(T::load(values[i]));
      const auto rounded = Wire::round(exact);
      to[i] = rounded;
      if (residual && !std::is_same_v<Wire, F32>) {
        const float error = gpu::minus(exact, Wire::load(rounded));
        if (error != 0.0f) residual[indices[i]] = canonical(gpu::plus(residual[indices[i]], error));
      }
    }
  }
}

TOPKUBE_KERNEL(32) seal(Hashed data, const u64* sums, std::uint8_t* out, const u32* verdict) {
  if (verdict[fault_word] != no_fault) return;
  const u64 hash = hash_end(data, sums);
  if (gpu::thread() == 0) *reinterpret_cast<u64*>(out + 16) = hash;
}

struct CheckShared {
  BlockScratch scratch;
};

// Encoded shards of equal size, `stride` bytes apart, with a verdict each. A kernel that checks them runs with a multiple of
// `count` blocks. The workspace of row i: `starts` from word i * starts_words on, and the sums of its hash.
struct Rows {
  const std::uint8_t* buffer;
  u64 count, stride, bytes, starts_words;
  u32* starts;
  u64* sums;
  u32* verdicts;
  TOPKUBE_DEVICE_MEMBER const std::uint8_t* row(u64 i) const { return buffer + i * stride; }
  TOPKUBE_DEVICE_MEMBER u32* starts_of(u64 i) const { return starts + i * starts_words; }
  TOPKUBE_DEVICE_MEMBER u32* verdict(u64 i) const { return verdicts + i * verdict_words; }
};

// Runs as one block per row. Checks the header, and computes where the entries of each block start. `starts` has room for one word
// per 4 bytes of the buffer.
TOPKUBE_KERNEL(check_threads) check_header(Rows rows, u64 expected_length) {
  auto& shared = gpu::shared<CheckShared>();
  const std::uint8_t* buffer = rows.row(gpu::block());
  const u64 bytes = rows.bytes;
  u32 *starts = rows.starts_of(gpu::block()), *verdict = rows.verdict(gpu::block());
  const auto* words = reinterpret_cast<const u32*>(buffer);
  u32 fault = no_fault;
  u64 length = 0, entries = 0;
  if (bytes < wire_header_bytes) {
    fault = too_short;
  } else if (words[0] != wire_magic) {
    fault = foreign;
  } else if (buffer[4] != wire_version) {
    fault = version;
  } else if (buffer[5] > 2) {
    fault = value_type;
  } else if (words[1] >> 16) {
    fault = padding;
  } else {
    length = words[2];
    entries = words[3];
    if (bytes != wire_bytes(length, entries, buffer[5] == 0 ? 4 : 2)) fault = size;
  }
  if (fault == no_fault) {  // `fault` is the same on all threads
    const u64 blocks = wire_blocks(length);
    u64 all = 0;
    bool crowded = false;
    for (u64 start = 0; start < blocks; start += gpu::threads()) {
      const u64 block = start + gpu::thread();
      const u32 entries_here = block < blocks ? words[wire_header_bytes / 4 + block] : 0;
      if (block < blocks)
        crowded |= entries_here >
                   (length - (block << wire_block_bits) < wire_block_size ? length - (block << wire_block_bits) : wire_block_size);
      const u64 up_to_lane = sum_up_to_lane(u64{entries_here});
      u64 sum;
      const u64 before_warp = sum_before_warp(gpu::shuffle(up_to_lane, 31u), shared.scratch, &sum);
      if (block < blocks) starts[block] = static_cast<u32>(all + before_warp + up_to_lane - entries_here);
      all += sum;
    }
    if (block_sum(crowded, shared.scratch) || all != entries) fault = counts;
  }
  if (gpu::thread() != 0) return;
  if (fault == no_fault) {
    verdict[entries_word] = static_cast<u32>(entries);
    verdict[length_word] = static_cast<u32>(length);
  }
  if (fault == no_fault && expected_length != ~u64{0} && length != expected_length) fault = other_length;
  if (fault != no_fault) verdict[fault_word] = fault;
}

// The sections of a buffer whose header has been checked.
struct Sections {
  u64 length, entries, blocks;
  const u16* offsets;
  const std::uint8_t* values;
  u32 code;
};
TOPKUBE_DEVICE Sections locate_sections(const std::uint8_t* buffer) {
  const auto* words = reinterpret_cast<const u32*>(buffer);
  Sections sections{words[2], words[3], wire_blocks(words[2]), nullptr, nullptr, buffer[5]};
  const std::uint8_t* offsets = buffer + wire_header_bytes + 4 * sections.blocks;
  sections.offsets = reinterpret_cast<const u16*>(offsets);
  sections.values = offsets + wire_offsets_bytes(sections.entries);
  return sections;
}

// Returns the block of entry i: the last block that is not empty and starts at or before the entry.
TOPKUBE_DEVICE u64 block_of(const u32* starts, u64 blocks, u64 i) { return count_below(starts, blocks, i + 1) - 1; }

TOPKUBE_DEVICE float load_value(const Sections& sections, u64 i) {
  if (sections.code == 0) return reinterpret_cast<const float*>(sections.values)[i];
  const u16 bits = reinterpret_cast<const u16*>(sections.values)[i];
  return sections.code == 1 ? from_bf16(bits) : from_f16(bits);
}

// Returns true if the header is so wrong that the sections cannot be located. If only the length is not the expected length, the
// other checks go on, because their faults count first.
TOPKUBE_DEVICE bool header_failed(const u32* verdict) { return verdict[entries_word] == no_fault; }

TOPKUBE_KERNEL(wire_threads) check_entries(Rows rows) {
  const u64 row = gpu::block() % rows.count;
  u32* verdict = rows.verdict(row);
  if (header_failed(verdict)) return;
  const Sections sections = locate_sections(rows.row(row));
  const u32* starts = rows.starts_of(row);
  const u64 first = gpu::block() / rows.count * gpu::threads() + gpu::thread(),
            stride = gpu::blocks() / rows.count * gpu::threads();
  if (first == 0 && sections.entries % 2 && sections.offsets[sections.entries]) gpu::lower(verdict + fault_word, u32{padding});
  for (u64 i = first; i < sections.entries; i += stride) {
    const u64 block = block_of(starts, sections.blocks, i);
    const bool descends = i > starts[block] && sections.offsets[i] <= sections.offsets[i - 1];
    if (descends || (block << wire_block_bits) + sections.offsets[i] >= sections.length)
      gpu::lower(verdict + fault_word, u32{order});
  }
}

TOPKUBE_KERNEL(32) check_seal(Rows rows, u64 hashed_bytes) {
  const std::uint8_t* buffer = rows.row(gpu::block());
  u32* verdict = rows.verdict(gpu::block());
  if (header_failed(verdict)) return;
  const u64 hash = hash_end(Hashed{buffer, hashed_bytes}, rows.sums + gpu::block() * hash_sums_of(hashed_bytes));
  if (gpu::thread() == 0 && hash != *reinterpret_cast<const u64*>(buffer + 16)) gpu::lower(verdict + fault_word, u32{checksum});
}

TOPKUBE_KERNEL(wire_threads) decode_entries(const std::uint8_t* buffer, const u32* starts, u64 room, u32* indices, float* values,
                                            const u32* verdict) {
  if (verdict[fault_word] != no_fault) return;
  const Sections sections = locate_sections(buffer);
  if (sections.entries != room) return;
  for (u64 i = u64{gpu::block()} * gpu::threads() + gpu::thread(); i < sections.entries; i += u64{gpu::blocks()} * gpu::threads()) {
    indices[i] = static_cast<u32>((block_of(starts, sections.blocks, i) << wire_block_bits) + sections.offsets[i]);
    values[i] = load_value(sections, i);
  }
}

template <class T>
TOPKUBE_KERNEL(wire_threads) decode_add_entries(const std::uint8_t* buffer, const u32* starts, typename T::Item* dense, float scale,
                                                u32* verdict) {
  if (verdict[fault_word] != no_fault) return;
  const Sections sections = locate_sections(buffer);
  bool nonfinite = false;
  for (u64 i = u64{gpu::block()} * gpu::threads() + gpu::thread(); i < sections.entries; i += u64{gpu::blocks()} * gpu::threads()) {
    const u64 index = (block_of(starts, sections.blocks, i) << wire_block_bits) + sections.offsets[i];
    const float value = load_value(sections, i);
    nonfinite |= (bits_of(value) & magnitude_bits) >= infinity_bits;
    dense[index] = T::round(canonical(gpu::plus(T::load(dense[index]), gpu::times(value, scale))));
  }
  if (gpu::ballot(nonfinite) && gpu::lane() == 0) gpu::publish(verdict + finite_word, 0u);
}

constexpr u32 cell_items = 8192, cells_per_block = wire_block_size / cell_items;
struct SumShared {
  BlockScratch scratch;
  float sums[cell_items];
};

// out = row 0 + row 1 + ..., in fp32, rounded once. A block computes cells of 8,192 elements in shared memory, so `out` is written
// once and never read. If a row is invalid, nothing is written. All checks must be done.
template <class T>
TOPKUBE_KERNEL(wire_threads) sum_rows(Rows rows, typename T::Item* out, u64 length) {
  auto& shared = gpu::shared<SumShared>();
  u64 invalid = 0;
  for (u64 row = gpu::thread(); row < rows.count; row += gpu::threads()) invalid += rows.verdict(row)[fault_word] != no_fault;
  if (block_sum(invalid, shared.scratch)) return;
  for (u64 cell = gpu::block(); cell * cell_items < length; cell += gpu::blocks()) {
    const u64 base = cell * cell_items, block = cell / cells_per_block;
    const u32 begin = static_cast<u32>(cell % cells_per_block) * cell_items;
    for (u32 i = gpu::thread(); i < cell_items; i += gpu::threads()) shared.sums[i] = 0.0f;
    for (u64 row = 0; row < rows.count; ++row) {
      gpu::sync();  // a row begins when the row before it has been added
      const Sections sections = locate_sections(rows.row(row));
      const u32* starts = rows.starts_of(row);
      const u64 start = starts[block], end = block + 1 < sections.blocks ? starts[block + 1] : sections.entries;
      const u64 first = start + count_below(sections.offsets + start, end - start, begin),
                last = start + count_below(sections.offsets + start, end - start, begin + cell_items);
      bool nonfinite = false;
      for (u64 i = first + gpu::thread(); i < last; i += gpu::threads()) {
        const float value = load_value(sections, i);
        nonfinite |= (bits_of(value) & magnitude_bits) >= infinity_bits;
        float& sum = shared.sums[sections.offsets[i] - begin];
        sum = canonical(gpu::plus(sum, value));
      }
      if (gpu::ballot(nonfinite) && gpu::lane() == 0) gpu::publish(rows.verdict(row) + finite_word, 0u);
    }
    gpu::sync();
    for (u32 i = gpu::thread(); i < cell_items && base + i < length; i += gpu::threads()) out[base + i] = T::round(shared.sums[i]);
    gpu::sync();
  }
}

// dense[indices[i]] += values[i]. Ascending indices are distinct, so their order does not matter. Other indices are added in order
// by one warp: lanes with equal indices add one after another.
template <class T, class Value>
TOPKUBE_KERNEL(wire_threads) scatter_add_entries(typename T::Item* dense, const u32* indices, const typename Value::Item* values,
                                                 u64 count, const u32* verdict) {
  if (verdict[fault_word] != no_fault) return;
  if (verdict[ascending_word] != 0) {
    for (u64 i = u64{gpu::block()} * gpu::threads() + gpu::thread(); i < count; i += u64{gpu::blocks()} * gpu::threads()) {
      dense[indices[i]] = T::round(canonical(gpu::plus(T::load(dense[indices[i]]), Value::load(values[i]))));
    }
    return;
  }
  if (gpu::block() != 0 || gpu::warp() != 0) return;
  const u32 lane = gpu::lane();
  for (u64 start = 0; start < count; start += 32) {
    const bool exists = start + lane < count;
    const u32 index = exists ? indices[start + lane] : 0;
    const float value = exists ? Value::load(values[start + lane]) : 0.0f;
    const u32 peers = gpu::matching(index) & gpu::ballot(exists), turn = gpu::popcount(peers & ((u32{1} << lane) - 1));
    for (u32 now = 0; gpu::ballot(exists && turn >= now); ++now) {
      if (exists && turn == now) dense[index] = T::round(canonical(gpu::plus(T::load(dense[index]), value)));
      gpu::sync_warp();
    }
  }
}

}  // namespace topkube
