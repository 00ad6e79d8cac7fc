// The chunks of an array that threads work on at the same time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/float_state.hpp"

namespace topkube {

constexpr std::size_t block = 4096;  // elements per call of an inner loop; determines the order of MSTopK's sums

// Calls work(chunk) for every chunk, each on its own thread, with IEEE arithmetic.
template <class Work>
void run_in_parallel(int chunks, const Work& work) {
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

// Returns the number of chunks: at most `threads`, and fewer if the array is small. A thread with less than 16 blocks of work
// does not save time.
inline int count_chunks(std::size_t length, int threads) {
  const std::size_t useful = length / (16 * block);
  return static_cast<int>(std::clamp<std::size_t>(useful, 1, static_cast<std::size_t>(std::max(threads, 1))));
}

// Returns the first element of a chunk. Chunks begin at block boundaries.
inline std::size_t chunk_start(std::size_t length, int chunk, int chunks) {
  const std::size_t blocks = (length + block - 1) / block;
  return std::min(length, blocks * static_cast<std::size_t>(chunk) / static_cast<std::size_t>(chunks) * block);
}

// Returns at least the number of elements of the longest chunk.
inline std::size_t longest_chunk(std::size_t length, int chunks) {
  const std::size_t blocks = (length + block - 1) / block, parts = static_cast<std::size_t>(chunks);
  return (blocks + parts - 1) / parts * block;
}

}  // namespace topkube
