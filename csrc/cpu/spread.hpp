// Sparse vectors, side by side, become one dense vector.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.hpp"

namespace topkube {

// Entries of one sparse vector; indices ascend.
struct SparsePart {
  const std::uint32_t* indices;
  const float* values;
  std::size_t count;
};

// out[length] = the sum of `parts`, added in their order in float32 and rounded once. Zeros and sums are made block by block in the
// first-level cache and streamed out, so `out` is written once and never read. Indices are below `length`.
void spread(void* out, Dtype dtype, std::size_t length, const std::vector<SparsePart>& parts);

}  // namespace topkube
