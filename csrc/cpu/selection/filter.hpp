// The pass over the array that finds the candidates: the entries that reach a threshold, which comes from a sample.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/dtype.hpp"
#include "cpu/paths/path.hpp"
#include "cpu/selection/chunks.hpp"
#include "cpu/selection/sampling.hpp"
#include "cpu/selection/workspace.hpp"

namespace topkube {

constexpr std::uint32_t magnitude_bits_16 = 0x7fffu;          // the bits of a 16-bit element except its sign
constexpr std::uint32_t unreachable_threshold = 0x80000000u;  // a threshold that no magnitude reaches

// The entries of one chunk that passed a filter, in ascending order of their indices.
struct Run {
  std::uint32_t* indices;
  std::uint32_t* values;
  std::size_t count;
};

struct Candidates {
  std::vector<Run> runs;  // one per chunk, in ascending order
  std::size_t count = 0;
  bool overflowed = false;
};

// The threshold of the filter, and the largest expected number of candidates.
struct FilterPlan {
  std::uint32_t threshold;
  std::size_t capacity;
};

std::size_t choose_sample_size(std::size_t length, std::size_t k);

// Returns a threshold that at least k magnitudes reach, almost certainly. `scratch` has room for choose_sample_size(...) + 1 words.
FilterPlan plan_from_sample(std::uint32_t* sample, std::size_t size, std::size_t length, std::size_t k, std::uint32_t* scratch);

// Samples the array and plans the filter. read(i) returns the bits of element i; `mask` leaves its magnitude.
template <class Read>
FilterPlan plan_filter(std::size_t length, std::size_t k, std::uint32_t mask, Workspace& workspace, const Read& read) {
  if (length <= 4 * block) return {0, length};            // the array fits in the cache: every entry is a candidate
  if (k > length / 4) return {unreachable_threshold, 0};  // candidates would take more memory than the array
  const std::size_t size = choose_sample_size(length, k);
  std::uint32_t* sample = workspace.reserve(2 * size + 1);
  const std::uint64_t stratum = (length << 16) / size;  // 48.16 fixed point
  for (std::size_t i = 0; i < size; ++i) {
    sample[i] = read(static_cast<std::size_t>(compute_sample_position(i, stratum))) & mask;
  }
  return plan_from_sample(sample, size, length, k, sample + size);
}

// Calls filter(start, size, threshold, indices, values) for every block, with chunks in parallel. `filter` returns how many entries
// it appended. If the buffer of a chunk is full, later calls get `unreachable_threshold`: they append nothing, but do other work.
template <class Filter>
Candidates filter_chunks(std::size_t length, const FilterPlan& plan, int threads, Workspace& workspace, const Filter& filter) {
  const int chunks = count_chunks(length, threads);
  const std::size_t room = std::min(plan.capacity, longest_chunk(length, chunks)) + block + filter_slack;
  std::uint32_t* words = workspace.reserve(2 * room * static_cast<std::size_t>(chunks));
  Candidates candidates;
  candidates.runs.resize(static_cast<std::size_t>(chunks));
  std::vector<char> full(static_cast<std::size_t>(chunks), plan.threshold == unreachable_threshold);
  run_in_parallel(chunks, [&](int chunk) {
    Run run{words + 2 * room * static_cast<std::size_t>(chunk), nullptr, 0};
    run.values = run.indices + room;
    const std::size_t end = chunk_start(length, chunk + 1, chunks);
    char is_full = full[static_cast<std::size_t>(chunk)];
    for (std::size_t start = chunk_start(length, chunk, chunks); start < end; start += block) {
      const std::uint32_t threshold = is_full ? unreachable_threshold : plan.threshold;
      const std::size_t appended =
          filter(start, std::min(block, end - start), threshold, run.indices + run.count, run.values + run.count);
      if (!is_full) run.count += appended;
      is_full |= run.count > plan.capacity;
      if (is_full && !Filter::continues_when_full) break;
    }
    full[static_cast<std::size_t>(chunk)] = is_full;
    candidates.runs[static_cast<std::size_t>(chunk)] = run;
  });
  for (std::size_t i = 0; i < candidates.runs.size(); ++i) {
    candidates.count += candidates.runs[i].count;
    candidates.overflowed |= full[i];
  }
  return candidates;
}

}  // namespace topkube
