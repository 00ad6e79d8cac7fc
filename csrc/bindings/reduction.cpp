#include "bindings/bind.hpp"
#include "cpu/reduction/low_rank.hpp"
#include "cpu/reduction/reduce.hpp"
#include "cpu/reduction/sparse_sum.hpp"

namespace topkube {
namespace {

using Indices = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableFloats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_reduction(nb::module_& module) {
  module.def(
      "sum",
      [](Bytes out, int out_code, const std::vector<ConstBytes>& inputs, int in_code, float factor) {
        const Dtype out_dtype = dtype_of(out_code), in_dtype = dtype_of(in_code);
        const std::size_t length = out.size() / item_size(out_dtype);
        require(!inputs.empty(), "inputs must not be empty");
        std::vector<const void*> pointers;
        for (const ConstBytes& input : inputs) {
          require(input.size() == length * item_size(in_dtype), "inputs differ in length");
          pointers.push_back(input.data());
        }
        void* to = out.data();
        nb::gil_scoped_release release;
        sum(to, out_dtype, pointers.data(), pointers.size(), in_dtype, length, factor);
      },
      nb::arg("out"), nb::arg("out_dtype"), nb::arg("inputs"), nb::arg("in_dtype"), nb::arg("scale"));
  module.def(
      "scale",
      [](Bytes data, int code, float factor) {
        const Dtype dtype = dtype_of(code);
        void* to = data.data();
        const std::size_t length = data.size() / item_size(dtype);
        nb::gil_scoped_release release;
        scale(to, dtype, length, factor);
      },
      nb::arg("data"), nb::arg("dtype"), nb::arg("factor"));
  module.def(
      "is_finite",
      [](ConstBytes data, int code) {
        const Dtype dtype = dtype_of(code);
        const void* from = data.data();
        const std::size_t length = data.size() / item_size(dtype);
        nb::gil_scoped_release release;
        return is_finite(from, dtype, length);
      },
      nb::arg("data"), nb::arg("dtype"));
  module.def(
      "are_finite",
      [](const std::vector<std::uintptr_t>& addresses, const std::vector<std::size_t>& lengths, int code) {
        require(addresses.size() == lengths.size(), "addresses and lengths differ in number");
        const Dtype dtype = dtype_of(code);
        nb::gil_scoped_release release;
        for (std::size_t i = 0; i < addresses.size(); ++i)
          if (!is_finite(reinterpret_cast<const void*>(addresses[i]), dtype, lengths[i])) return false;
        return true;
      },
      nb::arg("addresses"), nb::arg("lengths"), nb::arg("dtype"));
  module.def(
      "copy_each",
      [](const std::vector<std::uintptr_t>& targets, const std::vector<std::uintptr_t>& sources,
         const std::vector<std::size_t>& sizes) {
        require(targets.size() == sizes.size() && sources.size() == sizes.size(), "targets, sources and sizes differ in number");
        nb::gil_scoped_release release;
        for (std::size_t i = 0; i < sizes.size(); ++i)
          copy(reinterpret_cast<void*>(targets[i]), reinterpret_cast<const void*>(sources[i]), sizes[i]);
      },
      nb::arg("targets"), nb::arg("sources"), nb::arg("sizes"));
  module.def(
      "copy",
      [](Bytes out, ConstBytes input) {
        require(out.size() == input.size(), "out and input differ in length");
        void* to = out.data();
        const void* from = input.data();
        const std::size_t bytes = out.size();
        nb::gil_scoped_release release;
        copy(to, from, bytes);
      },
      nb::arg("out"), nb::arg("input"));
  module.def(
      "sum_sparse",
      [](Bytes out, int code, const std::vector<std::pair<Indices, Floats>>& parts) {
        const Dtype dtype = dtype_of(code);
        const std::size_t length = out.size() / item_size(dtype);
        std::vector<SparsePart> sparse;
        for (const auto& [indices, values] : parts) {
          require(indices.size() == values.size(), "indices and values differ in length");
          require(indices.size() == 0 || indices.data()[indices.size() - 1] < length, "an index exceeds the array");
          sparse.push_back({indices.data(), values.data(), indices.size()});
        }
        void* to = out.data();
        nb::gil_scoped_release release;
        sum_sparse(to, dtype, length, sparse);
      },
      nb::arg("out"), nb::arg("dtype"), nb::arg("parts"));
  module.def(
      "low_rank_product",
      [](Bytes out, int code, WritableFloats residual, Floats left, Floats right, std::size_t rank, float weight) {
        const Dtype dtype = dtype_of(code);
        require(rank >= 1, "rank is 0");
        const std::size_t rows = left.size() / rank, columns = right.size() / rank;
        require(left.size() == rows * rank && right.size() == columns * rank, "a factor has no whole number of rows");
        require(residual.size() == rows * columns && out.size() == residual.size() * item_size(dtype),
                "out, residual and factors differ in length");
        void* to = out.data();
        float* rest = residual.data();
        const float *a = left.data(), *b = right.data();
        nb::gil_scoped_release release;
        low_rank_product(to, dtype, rest, a, b, rows, columns, rank, weight);
      },
      nb::arg("out"), nb::arg("dtype"), nb::arg("residual"), nb::arg("left"), nb::arg("right"), nb::arg("rank"), nb::arg("weight"));
}

}  // namespace topkube
