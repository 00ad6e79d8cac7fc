// Selection by magnitude: exact top-k, error feedback fused with it, and MSTopK. docs/kernels.md explains the method.
//
// Magnitudes are compared as integers (the bits without the sign): the order is total, and NaN and infinity are the largest.
// Results go to arrays of k entries that the caller owns. Results do not depend on the path or on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.hpp"

namespace topkube {

// The work of one call: the passes over memory (at most 4; a pass that stopped early counts), and the number of candidates that
// passed the filter.
struct Effort {
  int passes = 0;
  std::size_t candidates = 0;
};

// Selects the k largest of `length` elements (1 <= k <= length < 2^32). Indices ascend; among equal magnitudes at the threshold the
// lowest indices are selected.
Effort topk(const void* data, Dtype dtype, std::size_t length, std::size_t k, int threads, std::uint32_t* indices, void* values);

// Computes acc = residual + gradient, moves the k largest entries of acc to `indices` and `values`, and sets them to zero in acc.
// `acc` is the gradient itself (fp32), or memory that overlaps neither input.
Effort compress(const void* gradient, Dtype dtype, const float* residual, float* acc, std::size_t length, std::size_t k,
                int threads, std::uint32_t* indices, float* values);

// The final upper and lower threshold of MSTopK, and how many magnitudes reach each (Algorithm 1: thres1, k1, thres2, k2).
struct Thresholds {
  float upper = 0, lower = 0;  // infinity and 0 if no probe set them
  std::size_t above_upper = 0, above_lower = 0;
};

// MSTopK: selects all k1 magnitudes >= upper, and k - k1 consecutive entries between the thresholds. `seed` determines the first
// of these. If the data contain NaN or infinity, the mean is useless, and the exact top-k is selected instead.
Effort mstopk(const void* data, Dtype dtype, std::size_t length, std::size_t k, int iterations, std::uint64_t seed, int threads,
              std::uint32_t* indices, void* values, Thresholds* thresholds);

}  // namespace topkube
