// One read of memory, as fast as plain code can do it. Benchmarks compare selection with this bound.
#pragma once

#include <cstddef>
#include <cstdint>

namespace topkube {

// Returns the sum of all 64-bit words, so that the compiler cannot remove the reads. The last bytes, if fewer than 64, are ignored.
std::uint64_t read_all(const void* data, std::size_t bytes);

}  // namespace topkube
