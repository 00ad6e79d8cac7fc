#include "cpu/selection/threshold.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/paths/path.hpp"

namespace topkube {
namespace {

thread_local Workspace sampled;
thread_local Workspace collected;

// Magnitudes from `lower` on and below `upper`, of which at most `capacity` are expected.
struct Band {
  std::uint32_t lower, upper;
  std::size_t capacity;
};

// A larger sample costs time (about 6 ns per element of it) and makes the band narrower: about 8 length sqrt(share / size) elements of
// 2 ns each. The sum is smallest at this size. With fewer than 64 samples above the threshold, the margins would be too wide.
std::size_t choose_band_sample(std::size_t length, std::size_t k) {
  const double n = static_cast<double>(length), share = static_cast<double>(k) / n;
  const double best = std::max(std::cbrt(std::pow(1.3 * n, 2) * share), 64 / share);
  return std::min(static_cast<std::size_t>(std::clamp(best, 1024.0, 32768.0)), length / 2);
}

Band plan_band(const float* data, std::size_t length, std::size_t k) {
  if (length <= 4 * block) return {0, unreachable_threshold, length};
  const std::size_t size = choose_band_sample(length, k);
  std::uint32_t* sample = sampled.reserve(2 * size + 1);
  const std::uint64_t stratum = (length << 16) / size;  // 48.16 fixed point
  for (std::size_t i = 0; i < size; ++i) {
    std::memcpy(sample + i, data + compute_sample_position(i, stratum), sizeof *sample);
    sample[i] &= magnitude_bits;
  }
  const double per_sample = static_cast<double>(length) / static_cast<double>(size);
  const double expected = static_cast<double>(k) / per_sample;
  const double margin = 4 * std::sqrt(expected) + 8;  // 4 standard deviations: a miss costs time, not exactness
  const std::vector<Run> run{{nullptr, sample, size}};
  const auto find = [&](double rank) {
    return find_kth_largest(run, static_cast<std::size_t>(rank), magnitude_bits, 0, sample + size).threshold;
  };
  const std::uint32_t lower = expected + margin < static_cast<double>(size) ? find(expected + margin) : 0;
  const std::uint32_t upper = expected - margin >= 1 ? find(expected - margin) : unreachable_threshold;
  const double room = 2 * margin + 5 * std::sqrt(expected + margin) + 8;
  return {lower, upper, std::min(length, static_cast<std::size_t>(room * per_sample))};
}

// Collects the magnitudes in the band, in parallel, until more than `capacity` have come in one chunk.
struct Collected {
  std::vector<Run> runs;  // without indices
  std::size_t count = 0, above = 0;
  bool overflowed = false;
};

Collected collect_band(const float* data, std::size_t length, const Band& band, int threads) {
  const int chunks = count_chunks(length, threads);
  const std::size_t room = std::min(band.capacity, longest_chunk(length, chunks)) + block + filter_slack;
  std::uint32_t* words = collected.reserve(room * static_cast<std::size_t>(chunks));
  std::vector<Collected> parts(static_cast<std::size_t>(chunks));
  const PathKernels& path = active_path();
  run_in_parallel(chunks, [&](int chunk) {
    std::uint32_t* magnitudes = words + room * static_cast<std::size_t>(chunk);
    Collected part;
    const std::size_t end = chunk_start(length, chunk + 1, chunks);
    for (std::size_t start = chunk_start(length, chunk, chunks); start < end && !part.overflowed; start += block) {
      part.count += path.collect_between(data + start, std::min(block, end - start), band.lower, band.upper,
                                         magnitudes + part.count, &part.above);
      part.overflowed = part.count > band.capacity;
    }
    part.runs = {{nullptr, magnitudes, part.count}};
    parts[static_cast<std::size_t>(chunk)] = std::move(part);
  });
  Collected all;
  for (const Collected& part : parts) {
    all.runs.push_back(part.runs.front());
    all.count += part.count;
    all.above += part.above;
    all.overflowed |= part.overflowed;
  }
  return all;
}

}  // namespace

FoundThreshold find_threshold(const float* data, std::size_t length, std::size_t k, int threads) {
  const Band band = plan_band(data, length, k);
  const Collected in_band = collect_band(data, length, band, threads);
  FoundThreshold found{{}, true};
  if (!in_band.overflowed && in_band.above < k && in_band.above + in_band.count >= k) {
    found.exact = find_kth_largest(in_band.runs, k - in_band.above, magnitude_bits, band.lower, sampled.reserve(in_band.count + 1));
    std::size_t equal = 0;
    for (const Run& run : in_band.runs)
      equal += static_cast<std::size_t>(std::count(run.values, run.values + run.count, found.exact.threshold));
    found.has_more_ties = equal > found.exact.ties;
  } else {
    int passes = 0;
    found.exact = find_threshold_by_histogram(data, Dtype::f32, length, k, threads, passes);
  }
  sampled.trim();
  collected.trim();
  return found;
}

}  // namespace topkube
