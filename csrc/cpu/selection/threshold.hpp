// The exact threshold of the k largest magnitudes, without a list of candidates: for a caller that reads the array a second time
// anyway, because it changes the selected elements.
#pragma once

#include <cstddef>

#include "cpu/selection/radix_select.hpp"

namespace topkube {

struct FoundThreshold {
  ExactThreshold exact;
  bool has_more_ties;  // false: exactly `exact.ties` magnitudes equal the threshold
};

// Finds the threshold of the k largest of `length` float32 (1 <= k <= length < 2^32). A sample gives a narrow band of magnitudes in
// which the k-th largest almost certainly is. One pass collects the band and counts what is above it.
FoundThreshold find_threshold(const float* data, std::size_t length, std::size_t k, int threads);

}  // namespace topkube
