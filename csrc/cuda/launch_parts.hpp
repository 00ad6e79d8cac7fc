// The launches of sums of many messages.
#pragma once

#include <algorithm>

#include "api.hpp"
#include "parts.hpp"

namespace topkube {

inline bool is_aligned_to_quads(const float* x) { return reinterpret_cast<std::uintptr_t>(x) % sizeof(Quad) == 0; }

// Adds all of `messages`, which are enough for one launch, to `values`.
template <class Messages>
void launch_parts(gpu::Launcher& launcher, float* values, u64 length, const Messages& messages) {
  launcher.launch(unpack_add<Messages>, launcher.blocks_for(length, unpack_threads / 32 * tile_elements, Messages::blocks),
                  unpack_threads, values, length, is_aligned_to_quads(values), messages, Progress{nullptr, true, true});
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
