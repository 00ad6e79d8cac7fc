// The table of inner loops that each path fills. It includes nothing that could share code through the linker.
#pragma once

#include <cstddef>
#include <cstdint>

namespace topkube {

struct PathKernels {
  const char* name;

  // Dense, indexed by Dtype. See reduce.hpp; these see one block at a time.
  using Widen = void (*)(float* out, const void* input, std::size_t length);               // out = input
  using WidenAdd = void (*)(float* out, const void* input, std::size_t length);            // out += input
  using Narrow = void (*)(void* out, const float* input, std::size_t length, float scale);  // out = round(input * scale)
  using IsFinite = bool (*)(const void* data, std::size_t length);
  Widen widen[3];
  WidenAdd widen_add[3];
  Narrow narrow[3];
  IsFinite is_finite[3];
  // out = (a + b) * scale, fp32. `out` may be `a` or `b`.
  void (*add_f32)(float* out, const float* a, const float* b, std::size_t length, float scale);
};

}  // namespace topkube
