// Dense kernels on the GPU: the same bits as csrc/cpu/reduce.hpp. Arithmetic is fp32, a 16-bit result is rounded once.
#pragma once

#include "../cpu/dtype.hpp"
#include "block.hpp"

namespace topkube {

constexpr u32 dense_threads = 256, most_inputs = 16;

struct Inputs {
  const void* of[most_inputs];
  u32 count;
};

// out = ((inputs[0] + inputs[1]) + ...) * scale; `out` may be one of the inputs. A thread has several loads under way before it
// stores: the compiler cannot put them there itself, as `out` may be what is loaded.
template <class In, class Out>
TOPKUBE_KERNEL(dense_threads) sum_inputs(typename Out::Item* out, Inputs inputs, u64 length, float scale) {
  constexpr u32 ahead = 8;
  const u64 stride = u64{gpu::blocks()} * gpu::threads();
  for (u64 start = u64{gpu::block()} * gpu::threads() + gpu::thread(); start < length; start += ahead * stride) {
    float sum[ahead];
    for (u32 input = 0; input < inputs.count; ++input) {
      const auto* x = static_cast<const typename In::Item*>(inputs.of[input]);
#pragma unroll
      for (u32 j = 0; j < ahead; ++j) {
        const u64 i = start + j * stride;
        const float item = i < length ? In::load(x[i]) : 0.0f;
        sum[j] = input == 0 ? item : sum[j] + item;
      }
    }
#pragma unroll
    for (u32 j = 0; j < ahead; ++j) {
      const u64 i = start + j * stride;
      if (i < length) out[i] = Out::round(sum[j] * scale);
    }
  }
}

// *flag becomes 0 where an element is NaN or infinite; it is left alone otherwise.
template <class T>
TOPKUBE_KERNEL(dense_threads) find_nonfinite(const typename T::Item* x, u64 length, u32* flag) {
  bool found = false;
  for (u64 i = u64{gpu::block()} * gpu::threads() + gpu::thread(); i < length; i += u64{gpu::blocks()} * gpu::threads()) {
    found |= (bits_of(T::load(x[i])) & 0x7fffffffu) >= 0x7f800000u;
  }
  if (gpu::ballot(found) && gpu::lane() == 0) gpu::publish(flag, 0u);
}

TOPKUBE_KERNEL(32) set_word(u32* to, u32 value) {
  if (gpu::thread() == 0) *to = value;
}

}  // namespace topkube
