// The product of two thin factors, and what it leaves of the matrix that it approximates.
#pragma once

#include <cstddef>

#include "cpu/dtype.hpp"

namespace topkube {

// out = left * right, and residual -= weight * out, in one pass. `left` has `rows` rows of `rank` elements, `right` has `rank` rows
// of `columns` elements, `out` and `residual` have `rows` rows of `columns` elements. The products of an element are added in the
// order of the rank, and the sum is rounded once to the type of `out`; what is subtracted is the rounded value. `rank` is at least
// 1. No array overlaps another.
void low_rank_product(void* out, Dtype dtype, float* residual, const float* left, const float* right, std::size_t rows,
                      std::size_t columns, std::size_t rank, float weight);

}  // namespace topkube
