#include "cpu/selection/filter.hpp"

#include <cmath>

#include "cpu/selection/radix_select.hpp"

namespace topkube {

std::size_t choose_sample_size(std::size_t length, std::size_t k) {
  // About 192 samples lie above the threshold if the density allows. With a margin of 4 sigma, the filter returns a third more
  // candidates than needed. Each sample is a cache miss, so a larger sample would cost more than it saves.
  const double samples = 192.0 * static_cast<double>(length) / static_cast<double>(k);
  const auto size = static_cast<std::size_t>(std::min(samples, 32768.0));
  return std::min(std::max<std::size_t>(size, 8192), length / 2);
}

FilterPlan plan_from_sample(std::uint32_t* sample, std::size_t size, std::size_t length, std::size_t k, std::uint32_t* scratch) {
  const double per_sample = static_cast<double>(length) / static_cast<double>(size);  // elements that one sample stands for
  const double expected = static_cast<double>(k) / per_sample;                        // samples above the k-th magnitude
  // 4 standard deviations of margin: once in tens of thousands of calls there are too few candidates, and the call takes longer.
  const auto rank = static_cast<std::size_t>(expected + 4 * std::sqrt(expected) + 8);
  // Room for the candidates that this rank lets pass, with 5 standard deviations of margin.
  const double room = static_cast<double>(rank) + 5 * std::sqrt(static_cast<double>(rank)) + 8;
  const std::vector<Run> run{{nullptr, sample, size}};
  const ExactThreshold kth = find_kth_largest(run, std::min(rank, size), magnitude_bits, 0, scratch);
  return {kth.threshold, std::min(length, static_cast<std::size_t>(room * per_sample))};
}

}  // namespace topkube
