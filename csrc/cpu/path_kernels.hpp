// The table of inner loops that each path fills. It includes nothing that could share code through the linker.
#pragma once

#include <cstddef>
#include <cstdint>

namespace topkube {

constexpr std::size_t filter_slack = 16;  // entries that a filter may write beyond those that it appends

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
  // Selection. Appends index and 32-bit value of every element whose value, less the sign, is at least `threshold` (an integer
  // up to 2^31) to `indices` and `values`; returns their number. `base` is the first element's index. Both buffers have room for
  // length + filter_slack entries.
  using Filter = std::size_t (*)(const void* data, std::size_t length, std::uint32_t base, std::uint32_t threshold,
                                 std::uint32_t* indices, std::uint32_t* values);
  Filter filter_bits[3];   // the value is the element's own bits, widened with zeros
  Filter filter_float[3];  // the value is the element as fp32
  // The same for acc = residual + gradient, which is written on the way, zero where it is appended. `acc` may be `gradient`.
  using AccumulateFilter = std::size_t (*)(const void* gradient, const float* residual, float* acc, std::size_t length,
                                           std::uint32_t base, std::uint32_t threshold, std::uint32_t* indices,
                                           std::uint32_t* values);
  AccumulateFilter accumulate_filter[3];
  // The sum of |x| in double, of a fixed shape (path_kernels.cpp), and the largest |x| as bits of fp32.
  using Moments = void (*)(const void* data, std::size_t length, double* sum, std::uint32_t* largest);
  Moments moments[3];

  // out = (a + b) * scale, fp32. `out` may be `a` or `b`.
  void (*add_f32)(float* out, const float* a, const float* b, std::size_t length, float scale);
};

}  // namespace topkube
