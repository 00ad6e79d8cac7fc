// The table of inner loops that each path fills. This header includes nothing that the linker could share between paths.
#pragma once

#include <cstddef>
#include <cstdint>

namespace topkube {

constexpr std::size_t filter_slack = 16;  // entries that a filter may write after the last entry that it appends

// The scale of a block: `step` is a bf16, and `inverse` is 1 / step, or 0 if the block is too small or not finite. In a block that is
// not finite, `step` is a NaN.
struct QuantisedScale {
  float step, inverse;
};

struct PathKernels {
  const char* name;

  // Dense kernels (cpu/reduction/reduce.hpp), indexed by Dtype.
  using Widen = void (*)(float* out, const void* input, std::size_t length);                // out = input
  using WidenAdd = void (*)(float* out, const void* input, std::size_t length);             // out += input
  using Narrow = void (*)(void* out, const float* input, std::size_t length, float scale);  // out = round(input * scale)
  using IsFinite = bool (*)(const void* data, std::size_t length);
  Widen widen[3];
  WidenAdd widen_add[3];
  Narrow narrow[3];
  IsFinite is_finite[3];
  // Selection. Appends the index and the 32-bit value of every element whose value without the sign is at least `threshold` (an
  // integer up to 2^31) to `indices` and `values`. Returns the number of appended entries. `base` is the index of the first
  // element. Both buffers have room for length + filter_slack entries.
  using Filter = std::size_t (*)(const void* data, std::size_t length, std::uint32_t base, std::uint32_t threshold,
                                 std::uint32_t* indices, std::uint32_t* values);
  Filter filter_bits[3];   // the value is the bits of the element, widened with zeros
  Filter filter_float[3];  // the value is the element as fp32
  // Appends the magnitudes in [lower, upper) to `magnitudes`, which has room for length + filter_slack, and returns their number. Adds
  // the number of magnitudes of `upper` and above to `above`.
  std::size_t (*collect_between)(const float* data, std::size_t length, std::uint32_t lower, std::uint32_t upper,
                                 std::uint32_t* magnitudes, std::size_t* above);
  // Writes acc = residual + gradient and filters it in the same pass; appended entries are zero in acc. `acc` may be `gradient`.
  using AccumulateFilter = std::size_t (*)(const void* gradient, const float* residual, float* acc, std::size_t length,
                                           std::uint32_t base, std::uint32_t threshold, std::uint32_t* indices,
                                           std::uint32_t* values);
  AccumulateFilter accumulate_filter[3];
  // Writes the sum of |x| in double, added in a fixed order (selection_loops.hpp), and the bits of the largest |x| as fp32.
  using SummariseMagnitudes = void (*)(const void* data, std::size_t length, double* sum, std::uint32_t* largest);
  SummariseMagnitudes summarise_magnitudes[3];

  // out = (a + b) * scale, fp32. `out` may be `a` or `b`.
  void (*add_f32)(float* out, const float* a, const float* b, std::size_t length, float scale);

  // One row of cpu/reduction/low_rank.hpp.
  using LowRankRow = void (*)(void* out, float* residual, const float* left, const float* right, std::size_t columns,
                              std::size_t rank, float weight);
  LowRankRow low_rank_row[3];

  // One block of cpu/sign/sign.hpp, of at most 256 elements. `sign_pack` returns the scale as bf16; the sum of |x| has a fixed
  // order (sign_loops.hpp). `sign_unpack_add` adds +-scales[p] over the parts, in their order, and then adds that sum.
  std::uint16_t (*sign_pack)(float* values, std::size_t length, std::uint8_t* bits);
  void (*sign_unpack_add)(float* values, std::size_t length, const float* scales, const std::uint8_t* const* bits,
                          std::size_t parts);

  // The bit planes of cpu/sign/top_sign.hpp, for `count` indices: bit p of all indices is in the bytes from planes + p * stride on.
  // `write_planes` writes the `low` lowest bits, and `read_planes` sets them in indices in which they are not set.
  void (*write_planes)(const std::uint32_t* indices, std::size_t count, unsigned low, std::size_t stride, std::uint8_t* planes);
  void (*read_planes)(const std::uint8_t* planes, std::size_t stride, unsigned low, std::size_t count, std::uint32_t* indices);

  // The upper bits of the indices of cpu/sign/top_sign.hpp (unary_loops.hpp).
  std::size_t (*write_unary)(const std::uint32_t* indices, std::size_t count, unsigned low, std::size_t offset, std::uint64_t* word,
                             std::uint8_t* out);

  // One block of cpu/quantised/quantised.hpp, of at most 256 elements, with integers of 3, 4 or 8 bits. `quantised_scale` returns its
  // scale, which `quantised_pack` takes. `quantised_unpack_add` adds the integers times scales[m] over the messages, in their order,
  // and then adds that sum.
  QuantisedScale (*quantised_scale)(const float* values, std::size_t length, int bits);
  void (*quantised_pack)(float* values, std::size_t length, int bits, QuantisedScale scale, std::uint8_t* codes);
  void (*quantised_unpack_add)(float* values, std::size_t length, int bits, const float* scales, const std::uint8_t* const* codes,
                               std::size_t messages);
};

}  // namespace topkube
