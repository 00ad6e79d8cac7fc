// Dense kernels on the GPU. They return the same bits as csrc/cpu/reduction/reduce.hpp. Arithmetic is fp32; a 16-bit result is
// rounded once.
#pragma once

#include "../cpu/dtype.hpp"
#include "block_reduce.hpp"

namespace topkube {

constexpr u32 dense_threads = 256, sum_blocks = 5, most_inputs = 16;

struct Inputs {
  const void* pointers[most_inputs];
  u32 count;
};

// out = ((inputs[0] + inputs[1]) + ...) * scale; `out` may be one of the inputs. A thread starts several loads before it
// stores. The compiler cannot reorder them itself, because `out` may be one of the inputs.
template <class In, class Out>
TOPKUBE_KERNEL(dense_threads, sum_blocks) sum_inputs(typename Out::Item* out, Inputs inputs, u64 length, float scale) {
  constexpr u32 ahead = 8;
  const u64 stride = u64{gpu::blocks()} * gpu::threads();
  for (u64 start = u64{gpu::block()} * gpu::threads() + gpu::thread(); start < length; start += ahead * stride) {
    float sum[ahead];
    for (u32 input = 0; input < inputs.count; ++input) {
      const auto* x = static_cast<const typename In::Item*>(inputs.pointers[input]);
#pragma unroll
      for (u32 j = 0; j < ahead; ++j) {
        const u64 i = start + j * stride;
        const float item = i < length ? In::load(x[i]) : 0.0f;
        sum[j] = input == 0 ? item : gpu::plus(sum[j], item);
      }
    }
#pragma unroll
    for (u32 j = 0; j < ahead; ++j) {
      const u64 i = start + j * stride;
      if (i < length) out[i] = Out::round(canonical(gpu::times(sum[j], scale)));
    }
  }
}

// Sets *flag to 0 if an element is NaN or infinite. Otherwise *flag does not change.
template <class T>
TOPKUBE_KERNEL(dense_threads) find_nonfinite(const typename T::Item* x, u64 length, u32* flag) {
  bool nonfinite = false;
  for (u64 i = u64{gpu::block()} * gpu::threads() + gpu::thread(); i < length; i += u64{gpu::blocks()} * gpu::threads()) {
    nonfinite |= (bits_of(T::load(x[i])) & magnitude_bits) >= infinity_bits;
  }
  if (gpu::ballot(nonfinite) && gpu::lane() == 0) gpu::publish(flag, 0u);
}

TOPKUBE_KERNEL(32) set_word(u32* to, u32 value) {
  if (gpu::thread() == 0) *to = value;
}

}  // namespace topkube
