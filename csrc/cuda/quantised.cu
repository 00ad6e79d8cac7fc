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
