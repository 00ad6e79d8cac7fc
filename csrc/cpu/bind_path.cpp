#include "bind.hpp"
#include "path.hpp"

namespace topkube {

void bind_path(nb::module_& module) {
  module.def("simd_paths", &available_paths, "The paths this CPU runs, best first.");
  module.def("use_simd", &use_path, nb::arg("name"), "Takes one path in all threads; false where this CPU cannot run it.");
  module.def("simd", [] { return std::string(active().name); }, "The path in use.");
}

}  // namespace topkube
