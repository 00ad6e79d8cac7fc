// One read of memory, as fast as plain code does it: the bound that benchmarks compare selection with.
#pragma once

#include <cstddef>
#include <cstdint>

namespace topkube {

// The sum of all 64-bit words (a rest of less than 64 bytes is left out), so that the reads cannot be dropped.
std::uint64_t read_all(const void* data, std::size_t bytes);

}  // namespace topkube
