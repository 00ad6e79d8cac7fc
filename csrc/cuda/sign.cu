// The C functions of signs.
#include "launch_parts.hpp"
#include "sign.hpp"

using namespace topkube;

// Sets *flag to 0 if a scale is NaN or infinite. The caller has set it to 1.
TOPKUBE_API topkube_cuda_sign_pack(int device, void* stream, float* values, u64 length, std::uint8_t* scales, std::uint8_t* bits,
                                   u32* flag) {
  const OnDevice on(device);
  if (on.error() || length == 0) return on.error();
  gpu::Launcher launcher(stream);
  launcher.launch(pack_signs, launcher.blocks_for(length, sign_block * sign_threads / 16, 8), sign_threads, values, length, scales,
                  bits, flag);
  return launcher.error();
}

// `scales`, `bits` and `weights`: `count` of each, in host memory.
TOPKUBE_API topkube_cuda_sign_unpack_add(int device, void* stream, float* values, u64 length, const u16* const* scales,
                                         const std::uint8_t* const* bits, const float* weights, u64 count, void* workspace,
                                         u64* needed) {
  return launch_unpack_add(device, stream, values, length, count, workspace, needed, [&](u64 first, u32 some) {
    SignMessages messages{};
    messages.count = some;
    std::copy_n(scales + first, some, messages.scales);
    std::copy_n(bits + first, some, messages.bits);
    std::copy_n(weights + first, some, messages.weights);
    return messages;
  });
}
