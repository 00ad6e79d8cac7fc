// Element types and their conversions, in integer arithmetic so that every path returns the same bits.
//
// Rounding to 16 bits is to nearest, ties to even. Denormals are kept in both directions. A NaN stays a NaN: the conversion keeps
// its sign and the top bits of its payload, and makes it quiet. A float beyond the range of fp16 becomes infinite, as in IEEE 754.
//
// All functions are `static`: this header is compiled into units with different instruction sets, and a function that the linker
// shares could bring AVX-512 code into the portable path. They are `constexpr` so that CUDA kernels can call them too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace topkube {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

static constexpr std::size_t item_size(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

static constexpr std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
static constexpr float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
static constexpr std::uint32_t magnitude_bits = 0x7fffffffu;        // the bits of a float except its sign
static constexpr std::uint32_t infinity_bits = 0x7f800000u;         // the magnitudes above are NaNs
static constexpr std::uint32_t smallest_normal_bits = 0x00800000u;  // 2^-126; the magnitudes below are denormals or zero

// Kernels pass every result of arithmetic through `canonical`. Which NaN an addition returns differs: x86 keeps the bits of an
// operand, or returns 0xffc00000; NVIDIA GPUs return 0x7fffffff. A NaN that a kernel computes is 0x7fc00000 everywhere, so that
// results have the same bits. A NaN that a kernel only copies or selects keeps its bits.
static constexpr std::uint32_t canonical_nan = 0x7fc00000u;
static constexpr float canonical(float result) { return result != result ? float_of(canonical_nan) : result; }

// Returns false for NaN and infinity, whose exponent is all ones.
static constexpr bool is_finite_bf16(std::uint32_t bits) { return (bits & 0x7f80u) != 0x7f80u; }

static constexpr float from_bf16(std::uint16_t bits) { return float_of(std::uint32_t{bits} << 16); }

static constexpr std::uint16_t to_bf16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & magnitude_bits) > infinity_bits ? quiet : rounded);
}

// The bias of exponents is 127 in fp32 and 15 in fp16. This is the difference, at the place of the exponent in an fp32.
static constexpr std::uint32_t f16_bias_difference = 112u << 23;

static constexpr float from_f16(std::uint16_t half) {
  const std::uint32_t sign = (std::uint32_t{half} & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  const std::uint32_t normal = (magnitude << 13) + f16_bias_difference;
  const std::uint32_t special = (magnitude << 13) | infinity_bits | (magnitude > 0x7c00u ? 0x400000u : 0u);
  // A denormal is a multiple of 2^-24; as a float it is normal, so the product is exact.
  const std::uint32_t denormal = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
  const std::uint32_t bits = magnitude < 0x400u ? denormal : magnitude < 0x7c00u ? normal : special;
  return float_of(sign | bits);
}

static constexpr std::uint16_t to_f16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & magnitude_bits;
  const std::uint32_t normal = (magnitude - f16_bias_difference + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const std::uint32_t special = magnitude > infinity_bits ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : 0x7c00u;
  // One ulp of 0.5f is 2^-24, the unit of fp16's denormals: the addition rounds to it.
  const std::uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  constexpr std::uint32_t smallest_normal = 0x38800000u, too_large = 0x47800000u;  // 2^-14 and 2^16
  const std::uint32_t rounded = magnitude < smallest_normal ? denormal : magnitude < too_large ? normal : special;
  return static_cast<std::uint16_t>(sign | rounded);
}

// Tags that name an element type in templates. `Item` is the type of an element in memory.
struct F32 {
  using Item = float;
  static constexpr float load(Item item) { return item; }
  static constexpr Item round(float value) { return value; }
};
struct BF16 {
  using Item = std::uint16_t;
  static constexpr float load(Item item) { return from_bf16(item); }
  static constexpr Item round(float value) { return to_bf16(value); }
};
struct F16 {
  using Item = std::uint16_t;
  static constexpr float load(Item item) { return from_f16(item); }
  static constexpr Item round(float value) { return to_f16(value); }
};

}  // namespace topkube
