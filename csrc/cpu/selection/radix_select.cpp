#include "cpu/selection/radix_select.hpp"

#include <array>
#include <bit>

namespace topkube {
namespace {

constexpr unsigned digit = 11;  // bits per histogram: its 8 KiB of counters stay in the first-level cache

// Does one round: counts (magnitude - least) by its top bits, and narrows [least, least + 2^bits) to the bin with the k-th largest.
// for_each(count) calls count(magnitude) for all magnitudes.
template <class ForEach>
void narrow_to_bin(const ForEach& for_each, std::size_t& k, std::uint32_t& least, unsigned& bits) {
  std::array<std::uint32_t, 1u << digit> bins{};
  const unsigned shift = bits > digit ? bits - digit : 0;
  for_each([&](std::uint32_t magnitude) { ++bins[(magnitude - least) >> shift]; });
  least += static_cast<std::uint32_t>(find_bin_of_kth(bins.data(), bins.size(), k)) << shift;
  bits = shift;
}

}  // namespace

ExactThreshold find_kth_largest(const std::vector<Run>& runs, std::size_t k, std::uint32_t mask, std::uint32_t least,
                                std::uint32_t* scratch) {
  std::uint32_t largest = least;
  for (const Run& run : runs) {
    for (std::size_t i = 0; i < run.count; ++i) largest = std::max(largest, run.values[i] & mask);
  }
  unsigned bits = static_cast<unsigned>(std::bit_width(largest - least));
  narrow_to_bin(
      [&](auto&& count) {
        for (const Run& run : runs) {
          for (std::size_t i = 0; i < run.count; ++i) count(run.values[i] & mask);
        }
      },
      k, least, bits);
  if (bits == 0) return {least, k};

  // The next rounds only read the magnitudes of that bin: of hundreds of thousands, usually a few hundred.
  std::size_t remaining = 0;
  for (const Run& run : runs) {
    for (std::size_t i = 0; i < run.count; ++i) {
      const std::uint32_t magnitude = run.values[i] & mask;
      scratch[remaining] = magnitude;
      remaining += (magnitude - least) >> bits == 0;  // below `least` this wraps to a large number
    }
  }

  while (bits > 0) {
    narrow_to_bin(
        [&](auto&& count) {
          for (std::size_t i = 0; i < remaining; ++i) count(scratch[i]);
        },
        k, least, bits);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < remaining; ++i) {
      scratch[kept] = scratch[i];
      kept += (scratch[i] - least) >> bits == 0;
    }
    remaining = kept;
  }
  return {least, k};
}

ExactThreshold find_threshold_by_histogram(const void* data, Dtype dtype, std::size_t length, std::size_t k, int threads,
                                           int& passes) {
  if (dtype != Dtype::f32) {
    const auto bins = build_histogram<std::uint16_t>(data, length, 1u << 15, threads,
                                                     [](std::uint32_t bits) { return bits & magnitude_bits_16; });
    passes += 1;
    const auto bin = static_cast<std::uint32_t>(find_bin_of_kth(bins.data(), bins.size(), k));
    return {bin, k};
  }
  const auto bins = build_histogram<std::uint32_t>(data, length, 1u << 16, threads,
                                                   [](std::uint32_t bits) { return (bits & magnitude_bits) >> 15; });
  const auto high = static_cast<std::uint32_t>(find_bin_of_kth(bins.data(), bins.size(), k)) << 15;
  // Magnitudes outside the bin wrap around or exceed 2^15, and are not counted.
  const auto fine = build_histogram<std::uint32_t>(data, length, 1u << 15, threads,
                                                   [high](std::uint32_t bits) { return (bits & magnitude_bits) - high; });
  passes += 2;
  const auto low = static_cast<std::uint32_t>(find_bin_of_kth(fine.data(), fine.size(), k));
  return {high | low, k};
}

}  // namespace topkube
