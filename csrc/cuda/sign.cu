// The C functions of signs.
#include "launch_parts.hpp"
#include "sign.hpp"

using namespace topkube;

static void place_signs(SignTable& table, u32 slot, u64 scales, u64 bits) {
  table.scales[slot] = scales;
  table.bits[slot] = bits;
}

// Sets *flag to 0 if a scale is NaN or infinite. The caller has set it to 1.
TOPKUBE_API topkube_cuda_sign_pack(int device, void* stream, float* values, u64 length, std::uint8_t* scales, std::uint8_t* bits,
                                   u32* flag) {
  const DeviceScope scope(device);
  if (scope.error() || length == 0) return scope.error();
  gpu::Launcher launcher(stream);
  launcher.launch(pack_signs, launcher.blocks_for(length, sign_block * sign_threads / 16, sign_blocks), sign_threads, values,
                  length, scales, bits, flag);
  return launcher.error();
}

// `scales`, `bits` and `weights` are arrays of `count` in host memory; `scales` and `bits` hold device pointers.
TOPKUBE_API topkube_cuda_sign_unpack_add(int device, void* stream, float* values, u64 length, const u16* const* scales,
                                         const std::uint8_t* const* bits, const float* weights, u64 count, void* workspace,
                                         u64* needed) {
  return launch_unpack_add(device, stream, values, length, count, workspace, needed, [&](u64 first, u32 part_count) {
    SignMessages messages{};
    messages.count = part_count;
    std::copy_n(scales + first, part_count, messages.scales);
    std::copy_n(bits + first, part_count, messages.bits);
    std::copy_n(weights + first, part_count, messages.weights);
    return messages;
  });
}

// Packs `count` parts of `values`, as sign_pack would one after another. Part i has lengths[i] elements from number starts[i] on. Its
// scales begin at byte scales[i] of `message`, and its signs at byte bits[i]. The arrays are in host memory.
TOPKUBE_API topkube_cuda_sign_pack_parts(int device, void* stream, float* values, std::uint8_t* message, u64 count,
                                         const u64* starts, const u64* lengths, const u64* scales, const u64* bits, u32* flag) {
  const DeviceScope scope(device);
  if (scope.error()) return scope.error();
  gpu::Launcher launcher(stream);
  SignTable table{};
  for_each_table(
      table, 2 * sign_block, count, starts, lengths, [&](u32 slot, u64 i) { place_signs(table, slot, scales[i], bits[i]); },
      [&] {
        launcher.launch(pack_signs_of_parts, launcher.blocks_for(table.units(), sign_threads / 32, sign_blocks), sign_threads,
                        values, message, table, flag);
      });
  return launcher.error();
}

// Adds `nodes` messages, at most 128, times their `weights` to parts of `values`, which are described as for sign_pack_parts.
TOPKUBE_API topkube_cuda_sign_unpack_add_parts(int device, void* stream, float* values, u64 nodes, const std::uint8_t* const* rows,
                                               const float* weights, u64 count, const u64* starts, const u64* lengths,
                                               const u64* scales, const u64* bits) {
  if (nodes > most_parts) return wrong_argument;
  const DeviceScope scope(device);
  if (scope.error()) return scope.error();
  gpu::Launcher launcher(stream);
  SignRows all{};
  all.count = static_cast<u32>(nodes);
  std::copy_n(rows, nodes, all.rows);
  std::copy_n(weights, nodes, all.weights);
  for_each_table(
      all.parts, tile_elements, count, starts, lengths, [&](u32 slot, u64 i) { place_signs(all.parts, slot, scales[i], bits[i]); },
      [&] { launch_parts(launcher, values, all); });
  return launcher.error();
}
