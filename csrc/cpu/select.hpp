// Selection by magnitude: exact top-k, error feedback fused with it, and MSTopK. docs/kernels.md explains the method.
//
// Magnitudes are compared as integers (the bits without the sign): the order is total, and NaN and infinity are the largest.
// Results go to arrays of k entries that the caller owns. Nothing depends on the path or on the number of threads, except which
// of several NaNs is kept where two are added.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.hpp"

namespace topkube {

// How the work went: passes over memory (at most 4, a pass that stopped early counts), candidates that the filter left.
struct Effort {
  int passes = 0;
  std::size_t candidates = 0;
};

// The k largest of `length` elements (1 <= k <= length < 2^32), ascending indices; at the threshold the lowest index wins.
Effort topk(const void* data, Dtype dtype, std::size_t length, std::size_t k, int threads, std::uint32_t* indices, void* values);

// acc = residual + gradient; the k largest of acc go to `indices` and `values` and are zero in acc afterwards. `acc` is the
// gradient itself (fp32), or memory apart from both.
Effort compress(const void* gradient, Dtype dtype, const float* residual, float* acc, std::size_t length, std::size_t k,
                int threads, std::uint32_t* indices, float* values);

// The last thresholds of MSTopK's two kinds and how many magnitudes reach them (Algorithm 1: thres1, k1, thres2, k2).
struct Thresholds {
  float upper = 0, lower = 0;  // infinite and 0 where no probe was of that kind
  std::size_t above_upper = 0, above_lower = 0;
};

// MSTopK: all of the k1 magnitudes >= upper, and a run of k - k1 neighbours, at an offset drawn from `seed`, of those between
// the thresholds. With NaN or infinity among the data the mean says nothing: then the exact top-k is returned.
Effort mstopk(const void* data, Dtype dtype, std::size_t length, std::size_t k, int iterations, std::uint64_t seed, int threads,
              std::uint32_t* indices, void* values, Thresholds* thresholds);

}  // namespace topkube
