// Radix select: the k-th largest magnitude by histograms of the upper bits, then of lower bits within one bin.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/selection/chunks.hpp"
#include "cpu/selection/filter.hpp"

namespace topkube {

// A threshold that selects exactly k entries: all entries above it, and `ties` of the entries that equal it.
struct ExactThreshold {
  std::uint32_t threshold;
  std::size_t ties;
};

// Finds the k-th largest magnitude with two histograms of the data, or with one if elements have 16 bits. Adds the passes to `passes`.
ExactThreshold find_threshold_by_histogram(const void* data, Dtype dtype, std::size_t length, std::size_t k, int threads,
                                           int& passes);

// Finds the k-th largest magnitude of the values in `runs`. All magnitudes are at least `least`, and k is between 1 and their
// number. `scratch` has room for all of them and one more. Each histogram has 2^11 bins and covers one bin of the histogram before.
ExactThreshold find_kth_largest(const std::vector<Run>& runs, std::size_t k, std::uint32_t mask, std::uint32_t least,
                                std::uint32_t* scratch);

// Returns the bin that holds the k-th largest element. Sets k to the rank of that element within the bin.
template <class Count>
std::size_t find_bin_of_kth(const Count* bins, std::size_t size, std::size_t& k) {
  std::size_t bin = size - 1;
  while (bins[bin] < k) k -= bins[bin--];
  return bin;
}

// Returns the histogram of part(bits) over all elements of `data` (32 or 16 bits each). Ignores values of `size` and above.
template <class Item, class Part>
std::vector<std::uint32_t> build_histogram(const void* data, std::size_t length, std::size_t size, int threads, const Part& part) {
  const int chunks = std::min(count_chunks(length, threads), 16);
  // Two tables per chunk: with one, increments of equal neighbours would wait for each other. The extra bin takes ignored values.
  const std::size_t stride = size + 1;
  std::vector<std::uint32_t> tables(2 * stride * static_cast<std::size_t>(chunks));
  run_in_parallel(chunks, [&](int chunk) {
    const Item* x = static_cast<const Item*>(data);
    std::uint32_t* even = tables.data() + 2 * stride * static_cast<std::size_t>(chunk);
    std::uint32_t* odd = even + stride;
    std::size_t i = chunk_start(length, chunk, chunks);
    const std::size_t end = chunk_start(length, chunk + 1, chunks);
    for (; i + 2 <= end; i += 2) {
      ++even[std::min<std::size_t>(part(x[i]), size)];
      ++odd[std::min<std::size_t>(part(x[i + 1]), size)];
    }
    if (i < end) ++even[std::min<std::size_t>(part(x[i]), size)];
  });
  for (std::size_t table = 1; table < 2 * static_cast<std::size_t>(chunks); ++table) {
    for (std::size_t i = 0; i < size; ++i) tables[i] += tables[table * stride + i];
  }
  tables.resize(size);
  return tables;
}

}  // namespace topkube
