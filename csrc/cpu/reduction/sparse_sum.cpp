#include "cpu/reduction/sparse_sum.hpp"

#include <algorithm>

#include "cpu/elements.hpp"
#include "cpu/float_state.hpp"
#include "cpu/paths/path.hpp"
#include "cpu/stream.hpp"

namespace topkube {

void sum_sparse(void* out, Dtype dtype, std::size_t length, const std::vector<SparsePart>& parts) {
  constexpr std::size_t block = 4096;
  const IeeeScope ieee;
  const PathKernels& path = active_path();
  const std::size_t item = item_size(dtype);
  alignas(64) float sums[block] = {};
  alignas(64) std::uint16_t narrow[block];
  std::vector<std::size_t> next(parts.size(), 0), first(parts.size());
  for (std::size_t start = 0; start < length; start += block) {
    const std::size_t size = std::min(block, length - start), end = start + size;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const SparsePart& part = parts[p];
      std::size_t i = first[p] = next[p];
      for (; i < part.count && part.indices[i] < end; ++i) {
        float& sum = sums[part.indices[i] - start];
        sum = canonical(sum + part.values[i]);
      }
      next[p] = i;
    }
    char* to = static_cast<char*>(out) + start * item;
    if (dtype == Dtype::f32) {
      stream_copy(to, sums, size * item);
    } else {
      path.narrow[code_of(dtype)](narrow, sums, size, 1.0f);
      stream_copy(to, narrow, size * item);
    }
    for (std::size_t p = 0; p < parts.size(); ++p)
      for (std::size_t i = first[p]; i < next[p]; ++i) sums[parts[p].indices[i] - start] = 0.0f;
  }
  end_stream();
}

}  // namespace topkube
