// The sum of several sparse vectors, as a dense vector.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/dtype.hpp"

namespace topkube {

// The entries of one sparse vector. Indices ascend.
struct SparsePart {
  const std::uint32_t* indices;
  const float* values;
  std::size_t count;
};

// Writes the sum of `parts` to out[length]: added in their order in float32, and rounded once. Each block is computed in the
// first-level cache and streamed to `out`, so `out` is written once and never read. Indices are below `length`.
void sum_sparse(void* out, Dtype dtype, std::size_t length, const std::vector<SparsePart>& parts);

}  // namespace topkube
