// Dense kernels: sums of fixed order, scaling, casting, copying.
//
// All of them work on plain memory of any alignment that fits the element, allocate nothing, take no lock, and may run while
// Python runs elsewhere. Arithmetic is fp32; a 16-bit result is rounded once (dtype.hpp). Bits depend on the inputs alone.
#pragma once

#include <cstddef>

#include "dtype.hpp"

namespace topkube {

// out[i] = (((inputs[0][i] + inputs[1][i]) + inputs[2][i]) + ...) * scale, in this order. `out` may be one of the inputs; it must
// not overlap one in part. `count` is at least 1.
void sum(void* out, Dtype out_dtype, const void* const* inputs, std::size_t count, Dtype in_dtype, std::size_t length,
         float scale);

// data[i] *= factor.
void scale(void* data, Dtype dtype, std::size_t length, float factor);

// out[i] = input[i], rounded where `out` is narrower. The two do not overlap, unless they are the same memory and type.
void cast(void* out, Dtype out_dtype, const void* input, Dtype in_dtype, std::size_t length);

// memcpy under a name that says that it is part of a reduction. The two do not overlap.
void copy(void* out, const void* input, std::size_t bytes);

// Whether no element is NaN or infinite.
bool is_finite(const void* data, Dtype dtype, std::size_t length);

}  // namespace topkube
