// Binds csrc/cpu/selection/. k is the length of `indices`. Every function returns the passes over memory and the number of
// candidates (see `Effort`); mstopk also returns its two thresholds, each followed by the number of magnitudes that reach it
// (see `Thresholds`).
#include "bindings/bind.hpp"
#include "cpu/selection/select.hpp"

namespace topkube {
namespace {

using Indices = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Requires 1 <= k <= length < 2^32, and room for k values in an array of `values_bytes` bytes, no more and no less.
void require_selection_sizes(std::size_t length, std::size_t k, std::size_t values_bytes, std::size_t item_bytes) {
  require(k >= 1 && k <= length, "k outside 1..length");
  require(length < std::size_t{1} << 32, "length does not fit 32-bit indices");
  require(values_bytes == k * item_bytes, "values and indices differ in length");
}

}  // namespace

void bind_selection(nb::module_& module) {
  module.def(
      "topk",
      [](ConstBytes data, int code, int threads, Indices indices, Bytes values) {
        const Dtype dtype = dtype_of(code);
        const std::size_t length = data.size() / item_size(dtype), k = indices.size();
        require_selection_sizes(length, k, values.size(), item_size(dtype));
        const void* from = data.data();
        std::uint32_t* to_indices = indices.data();
        void* to_values = values.data();
        nb::gil_scoped_release release;
        const Effort effort = topk(from, dtype, length, k, threads, to_indices, to_values);
        return std::pair(effort.passes, effort.candidates);
      },
      nb::arg("data"), nb::arg("dtype"), nb::arg("threads"), nb::arg("indices"), nb::arg("values"));
  module.def(
      "compress",
      [](ConstBytes gradient, int code, ConstBytes residual, Bytes acc, int threads, Indices indices, Bytes values) {
        const Dtype dtype = dtype_of(code);
        const std::size_t length = gradient.size() / item_size(dtype), k = indices.size();
        require_selection_sizes(length, k, values.size(), sizeof(float));
        require(residual.size() == length * sizeof(float) && acc.size() == length * sizeof(float),
                "residual or acc does not have one float32 per element of the gradient");
        const void* from = gradient.data();
        const auto* residual_values = reinterpret_cast<const float*>(residual.data());
        auto* acc_values = reinterpret_cast<float*>(acc.data());
        std::uint32_t* to_indices = indices.data();
        auto* to_values = reinterpret_cast<float*>(values.data());
        nb::gil_scoped_release release;
        const Effort effort = compress(from, dtype, residual_values, acc_values, length, k, threads, to_indices, to_values);
        return std::pair(effort.passes, effort.candidates);
      },
      nb::arg("gradient"), nb::arg("dtype"), nb::arg("residual"), nb::arg("acc"), nb::arg("threads"), nb::arg("indices"),
      nb::arg("values"));
  module.def(
      "mstopk",
      [](ConstBytes data, int code, int iterations, std::uint64_t seed, int threads, Indices indices, Bytes values) {
        const Dtype dtype = dtype_of(code);
        const std::size_t length = data.size() / item_size(dtype), k = indices.size();
        require_selection_sizes(length, k, values.size(), item_size(dtype));
        const void* from = data.data();
        std::uint32_t* to_indices = indices.data();
        void* to_values = values.data();
        Thresholds thresholds;
        Effort effort;
        {  // make_tuple below creates Python objects, so it needs the GIL again
          nb::gil_scoped_release release;
          effort = mstopk(from, dtype, length, k, iterations, seed, threads, to_indices, to_values, &thresholds);
        }
        return nb::make_tuple(effort.passes, effort.candidates, thresholds.upper, thresholds.above_upper, thresholds.lower,
                              thresholds.above_lower);
      },
      nb::arg("data"), nb::arg("dtype"), nb::arg("iterations"), nb::arg("seed"), nb::arg("threads"), nb::arg("indices"),
      nb::arg("values"));
}

}  // namespace topkube
