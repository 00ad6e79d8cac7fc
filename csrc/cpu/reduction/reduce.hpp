// Dense kernels: sums in a fixed order, scaling, casting and copying.
//
// All kernels work on plain memory that is aligned for its element type. They allocate nothing, take no lock, and can run while
// other threads run Python. Arithmetic is fp32; a 16-bit result is rounded once (dtype.hpp). The result's bits depend only on the
// inputs.
#pragma once

#include <cstddef>

#include "cpu/dtype.hpp"

namespace topkube {

// out[i] = (((inputs[0][i] + inputs[1][i]) + inputs[2][i]) + ...) * scale, in this order. `out` may be one of the inputs, but must
// not overlap an input partly. `count` is at least 1.
void sum(void* out, Dtype out_dtype, const void* const* inputs, std::size_t count, Dtype in_dtype, std::size_t length, float scale);

// data[i] *= factor.
void scale(void* data, Dtype dtype, std::size_t length, float factor);

// out[i] = input[i], rounded if `out` is narrower. The two must not overlap, unless they are the same memory with the same type.
void cast(void* out, Dtype out_dtype, const void* input, Dtype in_dtype, std::size_t length);

// Copies `bytes` bytes. `out` and `input` must not overlap partly.
void copy(void* out, const void* input, std::size_t bytes);

// Returns true if no element is NaN or infinite.
bool is_finite(const void* data, Dtype dtype, std::size_t length);

}  // namespace topkube
