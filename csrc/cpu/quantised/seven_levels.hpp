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
// The level of each magnitude from 0 to 3, the largest |x| of a group, and the limit above each level but the last: all in units.
static constexpr float levels[] = {0.0f, 3.0f, 8.0f, 14.0f}, level_bound = 16.0f;
static constexpr float limit_above_level(int i) { return 0.5f * (levels[i] + levels[i + 1]); }
static constexpr float smallest_level_scale = 0x1p-118f;  // so that the unit of every group is a normal number
static constexpr std::uint32_t last_exponent = 15;

// Returns 2^(-exponent / 2), the unit of a group as a fraction of the block's scale.
static constexpr float level_fraction(std::uint32_t exponent) {
  return float_of(bits_of(exponent % 2 == 0 ? 1.0f : 0.70710677f) - (exponent / 2 << 23));
}

// Returns the value of a code in units: two bits of magnitude, and the sign above them.
static constexpr float level_of(std::uint32_t code) {
  const float level = code % 4 == 0 ? levels[0] : code % 4 == 1 ? levels[1] : code % 4 == 2 ? levels[2] : levels[3];
  return code & 4u ? -level : level;
}

}  // namespace topkube
