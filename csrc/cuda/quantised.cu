// The C functions of integers with 4 or 8 bits.
#include "launch_parts.hpp"
#include "quantised.hpp"

namespace topkube {
namespace {

template <class Do>
int with_bits(int bits, const Do& act) {
  switch (bits) {
    case 4: return act(std::integral_constant<int, 4>{});
    case 8: return act(std::integral_constant<int, 8>{});
    default: return wrong_argument;
  }
}

}  // namespace
}  // namespace topkube

using namespace topkube;

// Sets *flag to 0 if a scale is NaN. The caller has set it to 1.
TOPKUBE_API topkube_cuda_quantised_pack(int device, void* stream, float* values, u64 length, int bits, std::uint8_t* message,
                                        u32* flag) {
  const DeviceScope scope(device);
  if (scope.error() || length == 0) return scope.error();
  return with_bits(bits, [&](auto bit_count) {
    gpu::Launcher launcher(stream);
    launcher.launch(pack_integers<bit_count>, launcher.blocks_for(length, quantised_block * quantise_threads / 32, quantise_blocks),
                    quantise_threads, values, length, is_aligned_to_quads(values), message, QuantisedLayout(length, bit_count),
                    flag);
    return launcher.error();
  });
}

// Packs `count` parts of `values`, as quantised_pack would one after another. Part i has lengths[i] elements from number starts[i]
// on, and its message begins at byte places[i] of `message`. The arrays are in host memory.
TOPKUBE_API topkube_cuda_quantised_pack_parts(int device, void* stream, float* values, int bits, std::uint8_t* message, u64 count,
                                              const u64* starts, const u64* lengths, const u64* places, u32* flag) {
  for (u64 i = 0; i < count; ++i) {
    const int error = topkube_cuda_quantised_pack(device, stream, values + starts[i], lengths[i], bits, message + places[i], flag);
    if (error) return error;
  }
  return 0;
}

// Adds `nodes` messages, at most 128, times their `weights` to parts of `values`, which are described as for quantised_pack_parts.
TOPKUBE_API topkube_cuda_quantised_unpack_add_parts(int device, void* stream, float* values, int bits, u64 nodes,
                                                    const std::uint8_t* const* rows, const float* weights, u64 count,
                                                    const u64* starts, const u64* lengths, const u64* places) {
  if (nodes > most_parts) return wrong_argument;
  const DeviceScope scope(device);
  if (scope.error()) return scope.error();
  return with_bits(bits, [&](auto bit_count) {
    gpu::Launcher launcher(stream);
    IntegerMessages<bit_count> messages{};
    messages.count = static_cast<u32>(nodes);
    std::copy_n(weights, nodes, messages.weights);
    for (u64 i = 0; i < count; ++i) {
      if (lengths[i] == 0) continue;
      messages.codes = QuantisedLayout(lengths[i], bit_count).codes;
      messages.length = lengths[i];
      for (u64 node = 0; node < nodes; ++node) messages.messages[node] = rows[node] + places[i];
      launch_parts(launcher, values + starts[i], lengths[i], messages);
    }
    return launcher.error();
  });
}

// `messages` and `weights` are arrays of `count` in host memory; `messages` holds device pointers.
TOPKUBE_API topkube_cuda_quantised_unpack_add(int device, void* stream, float* values, u64 length, int bits,
                                              const std::uint8_t* const* messages, const float* weights, u64 count, void* workspace,
                                              u64* needed) {
  return with_bits(bits, [&](auto bit_count) {
    return launch_unpack_add(device, stream, values, length, count, workspace, needed, [&](u64 first, u32 part_count) {
      IntegerMessages<bit_count> part{};
      part.codes = QuantisedLayout(length, bit_count).codes;
      part.length = length;
      part.count = part_count;
      std::copy_n(messages + first, part_count, part.messages);
      std::copy_n(weights + first, part_count, part.weights);
      return part;
    });
  });
}
