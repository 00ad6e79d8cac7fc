#include "bindings/bind.hpp"
#include "cpu/paths/path.hpp"
#include "cpu/paths/probe.hpp"

namespace topkube {

void bind_paths(nb::module_& module) {
  module.def("simd_paths", &available_paths, "Return the paths that this CPU can run, best first.");
  module.def("use_simd", &use_path, nb::arg("name"), "Use one path in all threads. Return false if this CPU cannot run it.");
  module.def("simd", [] { return std::string(active_path().name); }, "Return the path in use.");
  module.def(
      "read_all",
      [](ConstBytes data) {
        const void* from = data.data();
        const std::size_t bytes = data.size();
        nb::gil_scoped_release release;
        return read_all(from, bytes);
      },
      nb::arg("data"), "Read memory once, for benchmarks.");
}

}  // namespace topkube
