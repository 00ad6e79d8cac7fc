#include "cpu/selection/candidates.hpp"

#include <bit>

namespace topkube {
namespace {

constexpr unsigned digit = 11;  // bits per histogram: its 8 KiB of counters stay in the first-level cache

// Does one round: counts (value - least) by its top bits, and narrows [least, least + 2^bits) to the bin with the k-th largest.
template <class Each>
void narrow_to_bin(const Each& each, std::size_t& k, std::uint32_t& least, unsigned& bits) {
  std::array<std::uint32_t, 1u << digit> bins{};
  const unsigned shift = bits > digit ? bits - digit : 0;
  each([&](std::uint32_t magnitude) { ++bins[(magnitude - least) >> shift]; });
  least += static_cast<std::uint32_t>(bin_of_kth(bins.data(), bins.size(), k)) << shift;
  bits = shift;
}

}  // namespace

Exact kth_largest(const std::vector<Run>& runs, std::size_t k, std::uint32_t mask, std::uint32_t least, std::uint32_t* scratch) {
  std::uint32_t largest = least;
  for (const Run& run : runs) {
    for (std::size_t i = 0; i < run.count; ++i) largest = std::max(largest, run.values[i] & mask);
  }
  unsigned bits = static_cast<unsigned>(std::bit_width(largest - least));
  narrow_to_bin(
      [&](auto&& count_in) {
        for (const Run& run : runs) {
          for (std::size_t i = 0; i < run.count; ++i) count_in(run.values[i] & mask);
        }
      },
      k, least, bits);
  if (bits == 0) return {least, k};
  // Usually a few hundred of hundreds of thousands remain.
  std::size_t left = 0;
  for (const Run& run : runs) {
    for (std::size_t i = 0; i < run.count; ++i) {
      const std::uint32_t magnitude = run.values[i] & mask;
      scratch[left] = magnitude;
      left += (magnitude - least) >> bits == 0;  // below `least` this wraps to a large number
    }
  }
  while (bits > 0) {
    narrow_to_bin(
        [&](auto&& count_in) {
          for (std::size_t i = 0; i < left; ++i) count_in(scratch[i]);
        },
        k, least, bits);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < left; ++i) {
      scratch[kept] = scratch[i];
      kept += (scratch[i] - least) >> bits == 0;
    }
    left = kept;
  }
  return {least, k};
}

std::size_t sample_size(std::size_t length, std::size_t k) {
  // About 192 samples lie above the threshold if the density allows. With a margin of 4 sigma, the filter returns a third more
  // candidates than needed. Each sample is a cache miss, so a larger sample would cost more than it saves.
  const double wanted = 192.0 * static_cast<double>(length) / static_cast<double>(k);
  const auto size = static_cast<std::size_t>(std::min(wanted, 32768.0));
  return std::min(std::max<std::size_t>(size, 8192), length / 2);
}

Plan plan_from_sample(std::uint32_t* sample, std::size_t size, std::size_t length, std::size_t k, std::uint32_t* scratch) {
  const double per_sample = static_cast<double>(length) / static_cast<double>(size);
  const double expected = static_cast<double>(k) / per_sample;
  // 4 standard deviations of margin: once in tens of thousands of calls there are too few candidates, and the call takes longer.
  const auto rank = static_cast<std::size_t>(expected + 4 * std::sqrt(expected) + 8);
  const double most = static_cast<double>(rank) + 5 * std::sqrt(static_cast<double>(rank)) + 8;
  const std::vector<Run> run{{nullptr, sample, size}};
  const Exact kth = kth_largest(run, std::min(rank, size), magnitude_of_f32, 0, scratch);
  return {kth.threshold, std::min(length, static_cast<std::size_t>(most * per_sample))};
}

}  // namespace topkube
