// The positions of the sample that bounds the k-th magnitude: one position per stratum of equal size, at a hashed offset. A fixed
// stride would always read the same few columns of a matrix. CUDA kernels use the same functions.
#pragma once

#include <cstdint>

namespace topkube {

static constexpr std::uint64_t mix_bits(std::uint64_t value) {  // the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// Returns floor(stratum * hash / 2^32). `stratum` is below 2^48. The product has two halves, because it would overflow if `stratum`
// is 2^32 or more: with 8,192 samples, in arrays of more than 537 million elements.
static constexpr std::uint64_t scale_hash_to_stratum(std::uint32_t hash, std::uint64_t stratum) {
  return hash * (stratum >> 32) + (hash * (stratum & 0xffffffffu) >> 32);
}
static_assert(scale_hash_to_stratum(0xffffffffu, 1000) == 999);
static_assert(scale_hash_to_stratum(0x80000000u, std::uint64_t{3} << 33) == std::uint64_t{3} << 32);
static_assert(scale_hash_to_stratum(0xffffffffu, (std::uint64_t{1} << 48) - 1) >> 16 == 0xfffffffeu);

// Returns the position of sample i. `stratum` is a 48.16 fixed-point number of elements.
static constexpr std::uint64_t compute_sample_position(std::uint64_t i, std::uint64_t stratum) {
  return (i * stratum + scale_hash_to_stratum(static_cast<std::uint32_t>(mix_bits(i) >> 32), stratum)) >> 16;
}

}  // namespace topkube
