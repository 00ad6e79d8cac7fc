// The C functions of signs.
#include "launch_parts.hpp"
#include "sign.hpp"

using namespace topkube;

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
