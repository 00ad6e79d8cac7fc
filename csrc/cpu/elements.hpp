// Access to the elements of an array whose type is known only at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.hpp"

namespace topkube {

// Returns the place of a type in the tables of a path (paths/path_kernels.hpp).
static inline int code_of(Dtype dtype) { return static_cast<int>(dtype); }

// Returns the address of element `index` of an array.
static inline const char* element_address(const void* data, Dtype dtype, std::size_t index) {
  return static_cast<const char*>(data) + index * item_size(dtype);
}
static inline char* element_address(void* data, Dtype dtype, std::size_t index) {
  return static_cast<char*>(data) + index * item_size(dtype);
}

// Returns one element as the bits of an fp32.
static inline std::uint32_t load_element_bits(const void* data, Dtype dtype, std::size_t index) {
  if (dtype == Dtype::f32) return static_cast<const std::uint32_t*>(data)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[index];
  return bits_of(dtype == Dtype::bf16 ? from_bf16(bits) : from_f16(bits));
}

}  // namespace topkube
