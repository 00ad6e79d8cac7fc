#include "cpu/reduction/reduce.hpp"

#include <algorithm>
#include <cstring>

#include "cpu/elements.hpp"
#include "cpu/float_state.hpp"
#include "cpu/paths/path.hpp"

namespace topkube {
namespace {

constexpr std::size_t block = 2048;  // the fp32 sums of one block stay in the first-level cache

}  // namespace

void sum(void* out, Dtype out_dtype, const void* const* inputs, std::size_t count, Dtype in_dtype, std::size_t length,
         float scale) {
  const IeeeScope ieee;
  const PathKernels& path = active_path();
  if (count == 2 && in_dtype == Dtype::f32 && out_dtype == Dtype::f32) {
    path.add_f32(static_cast<float*>(out), static_cast<const float*>(inputs[0]), static_cast<const float*>(inputs[1]), length,
                 scale);
    return;
  }
  alignas(64) float sums[block];
  for (std::size_t start = 0; start < length; start += block) {
    const std::size_t size = std::min(block, length - start);
    path.widen[code_of(in_dtype)](sums, element_address(inputs[0], in_dtype, start), size);
    for (std::size_t i = 1; i < count; ++i)
      path.widen_add[code_of(in_dtype)](sums, element_address(inputs[i], in_dtype, start), size);
    path.narrow[code_of(out_dtype)](element_address(out, out_dtype, start), sums, size, scale);
  }
}

void scale(void* data, Dtype dtype, std::size_t length, float factor) {
  const void* input = data;
  sum(data, dtype, &input, 1, dtype, length, factor);
}

void cast(void* out, Dtype out_dtype, const void* input, Dtype in_dtype, std::size_t length) {
  if (out_dtype == in_dtype) {
    copy(out, input, length * item_size(in_dtype));
    return;
  }
  sum(out, out_dtype, &input, 1, in_dtype, length, 1.0f);
}

void copy(void* out, const void* input, std::size_t bytes) {
  if (out != input && bytes) std::memcpy(out, input, bytes);
}

bool is_finite(const void* data, Dtype dtype, std::size_t length) { return active_path().is_finite[code_of(dtype)](data, length); }

}  // namespace topkube
