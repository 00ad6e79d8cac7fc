// The C functions of the largest elements' indices.
#include "api.hpp"
#include "top_sign.hpp"

using namespace topkube;

// `indices`: the entries of `values` that `topk` has selected. `left`: what is left of each after the subtraction of what is sent.
// The scales and bits are already in the message.
TOPKUBE_API topkube_cuda_top_sign_write(int device, void* stream, float* values, u64 length, const u32* indices, const float* left,
                                        u64 count, std::uint8_t* message) {
  const DeviceScope scope(device);
  if (scope.error()) return scope.error();
  gpu::Launcher launcher(stream);
  launcher.launch(write_indices, launcher.blocks_for(count, index_threads, 8), index_threads, values, indices, left, message,
                  TopSignLayout(length, count));
  return launcher.error();
}

// Sets *flag to 0, and adds nothing, if the message is damaged. The caller has set it to 1.
TOPKUBE_API topkube_cuda_top_sign_unpack_add(int device, void* stream, float* values, u64 length, u64 count,
                                             const std::uint8_t* message, float weight, u32* flag, void* workspace, u64* needed) {
  return plan_or_run(device, stream, workspace, needed, [&](gpu::Launcher* launcher) {
    const TopSignLayout layout(length, count);
    const u64 tiles = (layout.high + 32 * tile_words - 1) / (32 * tile_words);
    Arena arena(workspace);
    u32* marks = arena.take<u32>(tiles);
    u32* indices = arena.take<u32>(count);
    if (launcher) {
      const u64 blocks = launcher->blocks_for(count, 2 * index_threads, 8);
      launcher->launch<IndexShared>(count_marks, tiles, index_threads, message, layout, marks);
      launcher->launch<IndexShared>(place_tiles, 1, place_threads, marks, tiles, count, flag);
      launcher->launch<ReadShared>(read_indices, tiles, index_threads, message, layout, static_cast<const u32*>(marks), indices);
      launcher->launch(check_ascent, blocks, index_threads, static_cast<const u32*>(indices), count, length, flag);
      launcher->launch(add_signs, blocks, index_threads, values, static_cast<const u32*>(indices), message, layout, weight,
                       static_cast<const u32*>(flag));
    }
    return arena.used();
  });
}
