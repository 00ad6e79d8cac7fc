// The values that 3 bits stand for, for the CPU and the CUDA code: seven levels, in a unit that 32 elements share.
// csrc/cpu/quantised/quantised.hpp describes the format.
//
// All functions are `static constexpr`, so that CUDA kernels can call them too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../dtype.hpp"

namespace topkube {

static constexpr std::size_t level_group = 32, level_planes = 3, level_group_bytes = 4 * level_planes;
// The largest |x| of a group, in units.
static constexpr float level_bound = 16.0f;

// Returns the level of a magnitude from 0 to 3, in units. It is not a table: nvcc replaces code that reads an array of the host by a
// trap, without a warning.
static constexpr float level_of_magnitude(std::uint32_t i) { return i == 0 ? 0.0f : i == 1 ? 3.0f : i == 2 ? 8.0f : 14.0f; }
// Returns the limit above each level but the last, in units.
static constexpr float limit_above_level(std::uint32_t i) { return 0.5f * (level_of_magnitude(i) + level_of_magnitude(i + 1)); }
static constexpr float smallest_level_scale = 0x1p-118f;  // so that the unit of every group is a normal number
static constexpr std::uint32_t last_exponent = 15;

// Returns 2^(-exponent / 2), the unit of a group as a fraction of the block's scale.
static constexpr float level_fraction(std::uint32_t exponent) {
  return float_of(bits_of(exponent % 2 == 0 ? 1.0f : 0.70710677f) - (exponent / 2 << 23));
}

// Returns the value of a code in units: two bits of magnitude, and the sign above them.
static constexpr float level_of(std::uint32_t code) {
  const float level = level_of_magnitude(code % 4);
  return code & 4u ? -level : level;
}

}  // namespace topkube
