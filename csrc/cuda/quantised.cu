// The C functions of integers with 3, 4 or 8 bits.
#include "launch_parts.hpp"
#include "quantised.hpp"

namespace topkube {
namespace {

template <class Do>
int with_bits(int bits, const Do& act) {
  switch (bits) {
    case 3: return act(std::integral_constant<int, 3>{});
    case 4: return act(std::integral_constant<int, 4>{});
    case 8: return act(std::integral_constant<int, 8>{});
    default: return wrong_argument;
  }
}

}  // namespace
}  // namespace topkube

using namespace topkube;

// Packs `count` parts of `values`, one message each. Part i has lengths[i] elements from number starts[i] on, and its message begins
// at byte places[i] of `message`. The arrays are in host memory. Sets *flag to 0 if a scale is NaN. The caller has set it to 1.
TOPKUBE_API topkube_cuda_quantised_pack_parts(int device, void* stream, float* values, int bits, std::uint8_t* message, u64 count,
                                              const u64* starts, const u64* lengths, const u64* places, u32* flag) {
  const DeviceScope scope(device);
  if (scope.error()) return scope.error();
  return with_bits(bits, [&](auto bit_count) {
    gpu::Launcher launcher(stream);
    IntegerTable table{};
    for_each_table(
        table, quantised_block, count, starts, lengths, [&](u32 slot, u64 i) { table.places[slot] = places[i]; },
        [&] {
          launcher.launch(pack_integers<bit_count>, launcher.blocks_for(table.units(), quantise_threads / 32, quantise_blocks),
                          quantise_threads, values, message, table, flag);
        });
    return launcher.error();
  });
}

// Packs `length` values, as one part.
TOPKUBE_API topkube_cuda_quantised_pack(int device, void* stream, float* values, u64 length, int bits, std::uint8_t* message,
                                        u32* flag) {
  const u64 first = 0;
  return topkube_cuda_quantised_pack_parts(device, stream, values, bits, message, 1, &first, &length, &first, flag);
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
    IntegerRows<bit_count> all{};
    all.count = static_cast<u32>(nodes);
    std::copy_n(rows, nodes, all.rows);
    std::copy_n(weights, nodes, all.weights);
    for_each_table(
        all.parts, tile_elements, count, starts, lengths, [&](u32 slot, u64 i) { all.parts.places[slot] = places[i]; },
        [&] { launch_parts(launcher, values, all); });
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
      part.count = part_count;
      std::copy_n(messages + first, part_count, part.messages);
      std::copy_n(weights + first, part_count, part.weights);
      return part;
    });
  });
}
