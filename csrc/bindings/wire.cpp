#include "cpu/wire/wire.hpp"
#include "bindings/bind.hpp"

namespace topkube {
namespace {

using Indices = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstIndices = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_wire(nb::module_& module) {
  module.def(
      "encoded_size",
      [](std::size_t length, std::size_t entries, int wire) { return encoded_size(length, entries, dtype_of(wire)); },
      nb::arg("length"), nb::arg("entries"), nb::arg("wire"));
  module.def(
      "encode",
      [](ConstIndices indices, ConstBytes values, int code, std::size_t length, int wire_code, std::optional<Bytes> residual,
         Bytes out) {
        const Dtype dtype = dtype_of(code), wire = dtype_of(wire_code);
        const std::size_t count = indices.size();
        require(values.size() == count * item_size(dtype), "values and indices differ in length");
        require(length < std::size_t{1} << 32, "length does not fit 32-bit indices");
        require(out.size() == encoded_size(length, count, wire), "the size of out is not encoded_size");
        require(!residual || residual->size() == length * sizeof(float), "residual has the wrong length");
        const std::uint32_t* from_indices = indices.data();
        const void* from_values = values.data();
        auto* to_residual = residual ? reinterpret_cast<float*>(residual->data()) : nullptr;
        std::uint8_t* to = out.data();
        nb::gil_scoped_release release;
        const std::size_t position = find_disorder(from_indices, count, length);
        if (position == count) encode(from_indices, from_values, dtype, count, length, wire, to_residual, to);
        return position;
      },
      nb::arg("indices"), nb::arg("values"), nb::arg("dtype"), nb::arg("length"), nb::arg("wire"), nb::arg("residual").none(),
      nb::arg("out"), "Return the position of the first index that is out of order, or the number of indices.");
  module.def(
      "check_wire",
      [](ConstBytes buffer) {
        const std::uint8_t* from = buffer.data();
        const std::size_t bytes = buffer.size();
        WireHeader header;
        {
          nb::gil_scoped_release release;
          header = check_wire(from, bytes);
        }
        return nb::make_tuple(static_cast<int>(header.fault), header.length, header.entries, static_cast<int>(header.wire));
      },
      nb::arg("buffer"), "Return (fault, length, entries, wire).");
  module.def(
      "decode",
      [](ConstBytes buffer, Indices indices, Bytes values) {
        const std::uint8_t* from = buffer.data();
        const std::size_t bytes = buffer.size(), count = indices.size();
        require(values.size() == count * sizeof(float), "values and indices differ in length");
        std::uint32_t* to_indices = indices.data();
        auto* to_values = reinterpret_cast<float*>(values.data());
        nb::gil_scoped_release release;
        const WireHeader header = check_wire(from, bytes);
        require(header.fault == WireFault::none && header.entries == count, "the buffer has not been checked");
        decode(from, header, to_indices, to_values);
      },
      nb::arg("buffer"), nb::arg("indices"), nb::arg("values"));
  module.def(
      "decode_add",
      [](ConstBytes buffer, Bytes dense, int code, float scale) {
        const Dtype dtype = dtype_of(code);
        const std::uint8_t* from = buffer.data();
        const std::size_t bytes = buffer.size(), length = dense.size() / item_size(dtype);
        void* to = dense.data();
        nb::gil_scoped_release release;
        const WireHeader header = check_wire(from, bytes);
        require(header.fault == WireFault::none && header.length == length, "the buffer has not been checked");
        return decode_add(from, header, to, dtype, scale);
      },
      nb::arg("buffer"), nb::arg("dense"), nb::arg("dtype"), nb::arg("scale"));
  module.def(
      "scatter_add",
      [](Bytes dense, int code, ConstIndices indices, ConstBytes values, int value_code) {
        const Dtype dtype = dtype_of(code), value_dtype = dtype_of(value_code);
        const std::size_t length = dense.size() / item_size(dtype), count = indices.size();
        require(values.size() == count * item_size(value_dtype), "values and indices differ in length");
        void* to = dense.data();
        const std::uint32_t* from_indices = indices.data();
        const void* from_values = values.data();
        nb::gil_scoped_release release;
        const std::size_t position = find_out_of_range(from_indices, count, length);
        if (position == count) scatter_add(to, dtype, from_indices, from_values, value_dtype, count);
        return position;
      },
      nb::arg("dense"), nb::arg("dtype"), nb::arg("indices"), nb::arg("values"), nb::arg("value_dtype"),
      "Return the position of the first index beyond dense, or the number of indices.");
}

}  // namespace topkube
