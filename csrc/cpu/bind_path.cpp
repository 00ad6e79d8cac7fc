#include "bind.hpp"
#include "path.hpp"
#include "probe.hpp"

namespace topkube {

void bind_path(nb::module_& module) {
  module.def("simd_paths", &available_paths, "The paths this CPU runs, best first.");
  module.def("use_simd", &use_path, nb::arg("name"), "Takes one path in all threads; false where this CPU cannot run it.");
  module.def("simd", [] { return std::string(active().name); }, "The path in use.");
  module.def(
      "read_all",
      [](ConstBytes data) {
        const void* from = data.data();
        const std::size_t bytes = data.size();
        nb::gil_scoped_release release;
        return read_all(from, bytes);
      },
      nb::arg("data"), "Reads memory once; for benchmarks.");
}

}  // namespace topkube
