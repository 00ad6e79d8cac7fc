// The values that 4 bits stand for, for the CPU and the CUDA code: the squares of integers up to 7, with the signs of the integers.
//
// All functions are `static constexpr`, so that CUDA kernels can call them too.
#pragma once

#include "../dtype.hpp"

namespace topkube {

static constexpr int largest_root = 7;

// Returns the limit between the squares of `root` and root + 1. A magnitude above it is nearer to the larger square.
static constexpr float limit_above_square(int root) { return 0.5f * static_cast<float>(root * root + (root + 1) * (root + 1)); }

// Returns the square of `root` with the sign of `root`.
static constexpr float signed_square(float root) { return root * float_of(bits_of(root) & magnitude_bits); }

}  // namespace topkube
