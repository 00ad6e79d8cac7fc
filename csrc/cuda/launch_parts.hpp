// The launches of sums of many messages.
#pragma once

#include <algorithm>

#include "api.hpp"
#include "parts.hpp"

namespace topkube {

inline bool is_aligned_to_quads(const float* x) { return reinterpret_cast<std::uintptr_t>(x) % sizeof(Quad) == 0; }

// Calls `act` for tables of all parts that have elements, as many as a table has room for at a time. `place(slot, i)` writes into
// slot `slot` of `table` what it has of part i besides PartTable. A unit has `unit_elements` elements.
template <class Table, class Place, class Act>
void for_each_table(Table& table, u64 unit_elements, u64 count, const u64* starts, const u64* lengths, const Place& place,
                    const Act& act) {
  u64 units = 0;
  table.count = 0;
  for (u64 i = 0; i < count; ++i) {
    if (lengths[i] == 0) continue;
    if (table.count == table_parts) {
      act();
      table.count = 0;
      units = 0;
    }
    units += (lengths[i] + unit_elements - 1) / unit_elements;
    const u32 slot = table.count++;
    table.starts[slot] = starts[i];
    table.lengths[slot] = lengths[i];
    table.ends[slot] = units;
    place(slot, i);
  }
  if (table.count) act();
}

// Adds the messages of `rows` about the parts of `values` in its table.
template <class Rows>
void launch_parts(gpu::Launcher& launcher, float* values, const Rows& rows) {
  launcher.launch(unpack_add_parts<Rows>, launcher.blocks_for(rows.parts.units(), unpack_threads / 32, Rows::blocks),
                  unpack_threads, values, rows);
}

// Adds `count` messages. `messages_of(first, count)` returns the argument of the kernel for `count` of them, from number `first`
// on.
template <class MessagesOf>
int launch_unpack_add(int device, void* stream, float* values, u64 length, u64 count, void* workspace, u64* needed,
                      const MessagesOf& messages_of) {
  return plan_or_run(device, stream, workspace, needed, [&](gpu::Launcher* launcher) {
    Arena arena(workspace);
    float* sums = arena.take<float>(count > most_parts ? length : 0);
    for (u64 first = 0; launcher && length && (first == 0 || first < count); first += most_parts) {
      const auto messages = messages_of(first, static_cast<u32>(std::min<u64>(most_parts, count - first)));
      using Messages = std::decay_t<decltype(messages)>;
      launcher->launch(unpack_add<Messages>, launcher->blocks_for(length, unpack_threads / 32 * tile_elements, Messages::blocks),
                       unpack_threads, values, length, is_aligned_to_quads(values), messages,
                       Progress{sums, first == 0, first + most_parts >= count});
    }
    return arena.used();
  });
}

}  // namespace topkube
