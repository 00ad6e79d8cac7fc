// The arrays that the selection kernels read: an array of any type, or the sum of a gradient and a residual.
#pragma once

#include <type_traits>

#include "../../cpu/dtype.hpp"
#include "state.hpp"

namespace topkube {

// A source returns the bits of element i that are compared, as 32-bit words. `peek` has no side effect. Loads and `finish` are
// separate so that a thread can start many loads before it uses the first value. `load_pack` loads 16 bytes at once (of a 16-bit
// gradient, 8). `reload` returns a value that was finished and stored before. A lane of `filter` has `steps` items at a time, in
// `chunks` packs.
template <class T>
struct Bits {
  using Item = typename T::Item;
  using Word = std::conditional_t<sizeof(Item) == 4, u32, u16>;
  static constexpr u32 width = sizeof(Item) == 4 ? 31 : 15, mask = (u32{1} << width) - 1;
  static constexpr u32 pack = 16 / sizeof(Word), chunks = 4, steps = chunks * pack;
  struct alignas(16) Raw {
    Word words[pack];
  };
  const Word* x;
  TOPKUBE_DEVICE_MEMBER u32 peek(u64 i) const { return x[i]; }
  TOPKUBE_DEVICE_MEMBER u32 reload(u64 i) const { return x[i]; }
  TOPKUBE_DEVICE_MEMBER Raw load_pack(u64 i) const { return *reinterpret_cast<const Raw*>(x + i); }
  TOPKUBE_DEVICE_MEMBER void load(u64 i, Raw& raw, u32 place) const { raw.words[place] = x[i]; }
  TOPKUBE_DEVICE_MEMBER u32 finish(const Raw& raw, u32 place) const { return raw.words[place]; }
  TOPKUBE_DEVICE_MEMBER void store_pack(u64, const u32*) const {}
  TOPKUBE_DEVICE_MEMBER void store(u64, u32) const {}
  static constexpr bool writes = false;
};

// Reads residual + gradient, and writes it to acc in the same pass.
template <class T>
struct Sums {
  using Item = typename T::Item;
  static constexpr u32 width = 31, mask = magnitude_bits, pack = 4, chunks = 4, steps = chunks * pack;
  struct alignas(pack * sizeof(Item)) Gradients {
    Item items[pack];
  };
  struct alignas(16) Floats {
    float items[pack];
  };
  struct Raw {
    Gradients gradient;
    Floats residual;
  };
  const Item* gradient;
  const float* residual;
  float* acc;
  TOPKUBE_DEVICE_MEMBER static u32 sum(Item gradient, float residual) {
    return bits_of(canonical(gpu::plus(residual, T::load(gradient))));
  }
  TOPKUBE_DEVICE_MEMBER u32 peek(u64 i) const { return sum(gradient[i], residual[i]); }
  TOPKUBE_DEVICE_MEMBER u32 reload(u64 i) const { return bits_of(acc[i]); }
  TOPKUBE_DEVICE_MEMBER Raw load_pack(u64 i) const {
    return {*reinterpret_cast<const Gradients*>(gradient + i), *reinterpret_cast<const Floats*>(residual + i)};
  }
  TOPKUBE_DEVICE_MEMBER void load(u64 i, Raw& raw, u32 place) const {
    raw.gradient.items[place] = gradient[i];
    raw.residual.items[place] = residual[i];
  }
  TOPKUBE_DEVICE_MEMBER u32 finish(const Raw& raw, u32 place) const {
    return sum(raw.gradient.items[place], raw.residual.items[place]);
  }
  TOPKUBE_DEVICE_MEMBER void store_pack(u64 i, const u32* values) const {
    Floats sums;
#pragma unroll
    for (u32 j = 0; j < pack; ++j) sums.items[j] = float_of(values[j]);
    *reinterpret_cast<Floats*>(acc + i) = sums;
  }
  TOPKUBE_DEVICE_MEMBER void store(u64 i, u32 value) const { acc[i] = float_of(value); }
  static constexpr bool writes = true;
};

}  // namespace topkube
