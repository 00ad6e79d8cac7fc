// What every binding shares. Each .cpp of this folder that has a Python face ends with one `bind_...(module)`.
//
// Arrays cross the border as one-dimensional, contiguous views of bytes with a dtype beside them (NumPy has no bfloat16 of its
// own). topkube/kernels.py has checked dtypes, lengths, overlap and writability; C++ checks what memory safety needs once more.
// Ownership never crosses: the caller's arrays live as long as the call, results are written into arrays that the caller made.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "dtype.hpp"

namespace topkube {

namespace nb = nanobind;

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

inline Dtype dtype_of(int code) {
  require(code >= 0 && code <= 2, "unknown dtype code");
  return static_cast<Dtype>(code);
}

void bind_exit(nb::module_& module);
void bind_gather(nb::module_& module);
void bind_path(nb::module_& module);
void bind_reduce(nb::module_& module);
void bind_shared_memory(nb::module_& module);
void bind_select(nb::module_& module);
void bind_wire(nb::module_& module);

}  // namespace topkube
