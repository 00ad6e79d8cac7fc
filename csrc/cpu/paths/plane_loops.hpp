// The loops of bit planes: bit p of all indices of a message, one bit per index. Index i has bit 7 - i % 8 of byte i / 8.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/paths/lanes.hpp"

namespace topkube {
namespace {

constexpr std::uint64_t lowest_of_each_byte = 0x0101010101010101u;

// Writes one byte of each plane, for `count` indices, at most eight. A product with `collect` moves the lowest bits of eight bytes
// into its highest byte.
void write_octet(const std::uint32_t* from, std::size_t count, unsigned low, std::size_t stride, std::uint8_t* planes) {
  constexpr std::uint64_t collect = 0x0102040810204080u;
  for (unsigned first = 0; first < low; first += 8) {
    std::uint64_t bytes = 0;  // bits first to first + 7 of each index; the first index has the highest byte
    for (std::size_t j = 0; j < count; ++j) bytes |= std::uint64_t{(from[j] >> first) & 0xffu} << (56 - 8 * j);
    for (unsigned plane = first; plane < low && plane < first + 8; ++plane, bytes >>= 1)
      planes[plane * stride] = static_cast<std::uint8_t>((bytes & lowest_of_each_byte) * collect >> 56);
  }
}

// Does the inverse. One product copies a byte of a plane into all eight bytes of a word; byte j of the word keeps the bit of index j,
// and becomes 1 if that bit is set.
void read_octet(const std::uint8_t* planes, std::size_t stride, unsigned low, std::size_t count, std::uint32_t* to) {
  constexpr std::uint64_t bit_of_each_byte = 0x0102040810204080u, below_sign = 0x7f7f7f7f7f7f7f7fu;
  for (unsigned first = 0; first < low; first += 8) {
    std::uint64_t bytes = 0;  // the first index has the lowest byte
    for (unsigned plane = first; plane < low && plane < first + 8; ++plane) {
      const std::uint64_t bits = planes[plane * stride] * lowest_of_each_byte & bit_of_each_byte;
      bytes |= ((bits + below_sign) >> 7 & lowest_of_each_byte) << (plane - first);
    }
    for (std::size_t j = 0; j < count; ++j) to[j] |= static_cast<std::uint32_t>(bytes >> (8 * j) & 0xffu) << first;
  }
}

#if defined(__AVX512F__) || defined(TOPKUBE_EMULATE_AVX512)

// Sixteen indices, each octet in reverse order, so that a mask of them has the bits of a plane.
constexpr std::size_t plane_lanes = 16;
Lanes::Vector reverse_octets(Lanes::Vector v) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8), v);
}
void write_lanes(const std::uint32_t* from, unsigned low, std::size_t stride, std::uint8_t* planes) {
  const Lanes::Vector indices = reverse_octets(Lanes::load(from));
  for (unsigned plane = 0; plane < low; ++plane) {
    const auto bits = static_cast<std::uint16_t>(_mm512_test_epi32_mask(indices, Lanes::broadcast(1u << plane)));
    __builtin_memcpy(planes + plane * stride, &bits, sizeof bits);
  }
}
void read_lanes(const std::uint8_t* planes, std::size_t stride, unsigned low, std::uint32_t* to) {
  Lanes::Vector indices = Lanes::broadcast(0);
  for (unsigned plane = 0; plane < low; ++plane) {
    std::uint16_t bits;
    __builtin_memcpy(&bits, planes + plane * stride, sizeof bits);
    indices = _mm512_mask_or_epi32(indices, static_cast<__mmask16>(bits), indices, Lanes::broadcast(1u << plane));
  }
  Lanes::store(to, _mm512_or_si512(Lanes::load(to), reverse_octets(indices)));
}

#elif defined(__AVX2__)

constexpr std::size_t plane_lanes = 8;
Lanes::Vector reverse_octets(Lanes::Vector v) { return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0)); }
void write_lanes(const std::uint32_t* from, unsigned low, std::size_t stride, std::uint8_t* planes) {
  const Lanes::Vector indices = reverse_octets(Lanes::load(from));
  for (unsigned plane = 0; plane < low; ++plane) {
    const Lanes::Vector at_sign = _mm256_sll_epi32(indices, _mm_cvtsi32_si128(static_cast<int>(31 - plane)));
    planes[plane * stride] = static_cast<std::uint8_t>(_mm256_movemask_ps(_mm256_castsi256_ps(at_sign)));
  }
}
void read_lanes(const std::uint8_t* planes, std::size_t stride, unsigned low, std::uint32_t* to) {
  const Lanes::Vector bit_of_lane = _mm256_setr_epi32(128, 64, 32, 16, 8, 4, 2, 1);
  Lanes::Vector indices = Lanes::load(to);
  for (unsigned plane = 0; plane < low; ++plane) {
    const Lanes::Vector bits = Lanes::bitwise_and(Lanes::broadcast(planes[plane * stride]), bit_of_lane);
    const Lanes::Vector is_set = _mm256_cmpeq_epi32(bits, bit_of_lane);
    indices = _mm256_or_si256(indices, Lanes::bitwise_and(is_set, Lanes::broadcast(1u << plane)));
  }
  Lanes::store(to, indices);
}

#else

constexpr std::size_t plane_lanes = 8;
void write_lanes(const std::uint32_t* from, unsigned low, std::size_t stride, std::uint8_t* planes) {
  write_octet(from, 8, low, stride, planes);
}
void read_lanes(const std::uint8_t* planes, std::size_t stride, unsigned low, std::uint32_t* to) {
  read_octet(planes, stride, low, 8, to);
}

#endif

void write_planes(const std::uint32_t* indices, std::size_t count, unsigned low, std::size_t stride, std::uint8_t* planes) {
  std::size_t i = 0;
  for (; i + plane_lanes <= count; i += plane_lanes) write_lanes(indices + i, low, stride, planes + i / 8);
  for (; i < count; i += 8) write_octet(indices + i, count - i < 8 ? count - i : 8, low, stride, planes + i / 8);
}

void read_planes(const std::uint8_t* planes, std::size_t stride, unsigned low, std::size_t count, std::uint32_t* indices) {
  std::size_t i = 0;
  for (; i + plane_lanes <= count; i += plane_lanes) read_lanes(planes + i / 8, stride, low, indices + i);
  for (; i < count; i += 8) read_octet(planes + i / 8, stride, low, count - i < 8 ? count - i : 8, indices + i);
}

}  // namespace
}  // namespace topkube
