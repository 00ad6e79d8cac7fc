// Declarations that all bindings share. Each .cpp file of this folder binds one folder of csrc/cpu in one function `bind_...`.
//
// Arrays arrive as one-dimensional, contiguous views of bytes. Their dtype arrives as a separate code, because NumPy has no
// bfloat16. The Python functions in topkube/kernels/ have checked dtypes, lengths, overlap and writability. The bindings check
// again what memory safety needs. They never take ownership: the caller's arrays live as long as the call, and results are
// written into arrays that the caller allocated. Only `map_file` returns an array: a mapping, which ends with the array.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "cpu/dtype.hpp"

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
void bind_links(nb::module_& module);
void bind_records(nb::module_& module);
void bind_paths(nb::module_& module);
void bind_quantised(nb::module_& module);
void bind_reduction(nb::module_& module);
void bind_node(nb::module_& module);
void bind_selection(nb::module_& module);
void bind_sign(nb::module_& module);
void bind_wire(nb::module_& module);

}  // namespace topkube
