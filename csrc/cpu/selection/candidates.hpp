// Code that topk, compress and mstopk share: the sample, the filter pass over chunks, and the exact selection from the candidates.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/float_state.hpp"
#include "cpu/paths/path.hpp"
#include "cpu/selection/sampling.hpp"
#include "cpu/selection/select.hpp"

namespace topkube {

constexpr std::uint32_t magnitude_of_f32 = 0x7fffffffu;
constexpr std::uint32_t magnitude_of_16 = 0x7fffu;
constexpr std::uint32_t nothing = 0x80000000u;  // a threshold that no magnitude reaches
constexpr std::size_t block = 4096;             // elements per call of an inner loop; determines the order of MSTopK's sums

// Memory that a thread keeps between calls, because fresh pages cost more than the selection from them. A large workspace is freed
// after the call.
class Workspace {
 public:
  std::uint32_t* room(std::size_t words) {
    if (words > size_) {
      words_.reset();  // freed first, so that old and new memory never exist at the same time
      words_.reset(new std::uint32_t[words]);
      size_ = words;
    }
    return words_.get();
  }
  void trim() {
    if (size_ > (std::size_t{64} << 20) / sizeof(std::uint32_t)) {
      words_.reset();
      size_ = 0;
    }
  }

 private:
  std::unique_ptr<std::uint32_t[]> words_;
  std::size_t size_ = 0;
};

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
struct Plan {
  std::uint32_t threshold;
  std::size_t capacity;
};

// Calls work(chunk) for every chunk, each on its own thread, with IEEE arithmetic.
template <class Work>
void in_parallel(int chunks, const Work& work) {
  std::vector<std::thread> threads;
  for (int chunk = 1; chunk < chunks; ++chunk) {
    const auto run = [&work, chunk] {
      const IeeeScope ieee;
      work(chunk);
    };
    try {
      threads.emplace_back(run);
    } catch (const std::system_error&) {  // the system allows no more threads
      run();
    }
  }
  work(0);
  for (std::thread& thread : threads) thread.join();
}

// Returns the number of chunks. Chunks begin at block boundaries. Small arrays get one chunk, because a thread would not pay off.
inline int chunks_of(std::size_t length, int threads) {
  const std::size_t worth = length / (16 * block);
  return static_cast<int>(std::clamp<std::size_t>(worth, 1, static_cast<std::size_t>(std::max(threads, 1))));
}
inline std::size_t chunk_start(std::size_t length, int chunk, int chunks) {
  const std::size_t blocks = (length + block - 1) / block;
  return std::min(length, blocks * static_cast<std::size_t>(chunk) / static_cast<std::size_t>(chunks) * block);
}

// A threshold that selects exactly k entries: all entries above it, and `ties` of the entries that equal it.
struct Exact {
  std::uint32_t threshold;
  std::size_t ties;
};

// Finds the k-th largest magnitude of the values in `runs`, all of which are at least `least`; k is between 1 and their number.
// `scratch` has room for all of them and one more. Uses histograms of 2^11 bins; each covers one bin of the histogram before it.
Exact kth_largest(const std::vector<Run>& runs, std::size_t k, std::uint32_t mask, std::uint32_t least, std::uint32_t* scratch);

// `scratch` has room for sample_size(...) + 1 words.
std::size_t sample_size(std::size_t length, std::size_t k);
Plan plan_from_sample(std::uint32_t* sample, std::size_t size, std::size_t length, std::size_t k, std::uint32_t* scratch);

template <class Read>
Plan plan_filter(std::size_t length, std::size_t k, std::uint32_t mask, Workspace& workspace, const Read& read) {
  if (length <= 4 * block) return {0, length};  // the array fits in the cache: every entry is a candidate
  if (k > length / 4) return {nothing, 0};      // candidates would take more memory than the array
  const std::size_t size = sample_size(length, k);
  std::uint32_t* sample = workspace.room(2 * size + 1);
  const std::uint64_t stratum = (length << 16) / size;  // 48.16 fixed point
  for (std::size_t i = 0; i < size; ++i) {
    sample[i] = read(static_cast<std::size_t>(sample_position(i, stratum))) & mask;
  }
  return plan_from_sample(sample, size, length, k, sample + size);
}

// Calls filter(start, size, threshold, indices, values) for every block, with chunks in parallel. `filter` returns how many entries
// it appended. If the buffer of a chunk is full, later calls get the threshold `nothing`: they append nothing, but do other work.
template <class Filter>
Candidates filter_pass(std::size_t length, const Plan& plan, int threads, Workspace& workspace, const Filter& filter) {
  const int chunks = chunks_of(length, threads);
  const std::size_t room = plan.capacity + block + filter_slack;
  std::uint32_t* words = workspace.room(2 * room * static_cast<std::size_t>(chunks));
  Candidates candidates;
  candidates.runs.resize(static_cast<std::size_t>(chunks));
  std::vector<char> full(static_cast<std::size_t>(chunks), plan.threshold == nothing);
  in_parallel(chunks, [&](int chunk) {
    Run run{words + 2 * room * static_cast<std::size_t>(chunk), nullptr, 0};
    run.values = run.indices + room;
    const std::size_t end = chunk_start(length, chunk + 1, chunks);
    char is_full = full[static_cast<std::size_t>(chunk)];
    for (std::size_t start = chunk_start(length, chunk, chunks); start < end; start += block) {
      const std::uint32_t threshold = is_full ? nothing : plan.threshold;
      const std::size_t appended =
          filter(start, std::min(block, end - start), threshold, run.indices + run.count, run.values + run.count);
      if (!is_full) run.count += appended;
      is_full |= run.count > plan.capacity;
      if (is_full && !Filter::goes_on) break;
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

// Returns the bin that holds the k-th largest element. Sets k to the rank of that element within the bin.
template <class Count>
std::size_t bin_of_kth(const Count* bins, std::size_t size, std::size_t& k) {
  std::size_t bin = size - 1;
  while (bins[bin] < k) k -= bins[bin--];
  return bin;
}

// Returns the histogram of part(bits) over all elements of `data` (32 or 16 bits each). Ignores values of `size` and above.
template <class Item, class Part>
std::vector<std::uint32_t> histogram(const void* data, std::size_t length, std::size_t size, int threads, const Part& part) {
  const int chunks = std::min(chunks_of(length, threads), 16);
  // Two tables per chunk: with one, increments of equal neighbours would wait for each other. The extra bin takes ignored values.
  const std::size_t stride = size + 1;
  std::vector<std::uint32_t> tables(2 * stride * static_cast<std::size_t>(chunks));
  in_parallel(chunks, [&](int chunk) {
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

// Selects exactly from the candidates of a filter with `plan`, or from the data again (at most three more passes) if there are too
// few or too many candidates.
Effort select_f32_from(const Candidates& candidates, const Plan& plan, const float* data, std::size_t length, std::size_t k,
                       int threads, std::uint32_t* indices, float* values);

}  // namespace topkube
