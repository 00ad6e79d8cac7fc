// The extension module topkube._kernels. It works on arrays and sockets: it uses neither MPI nor torch.
#include "bindings/bind.hpp"

NB_MODULE(_kernels, module) {
  // The end of a program may leave messages under way, with the objects that hold their memory.
  nanobind::set_leak_warnings(false);
  module.doc() = "TopKube's compiled kernels; use topkube.kernels.";
  topkube::bind_exit(module);
  topkube::bind_links(module);
  topkube::bind_records(module);
  topkube::bind_paths(module);
  topkube::bind_quantised(module);
  topkube::bind_reduction(module);
  topkube::bind_node(module);
  topkube::bind_selection(module);
  topkube::bind_sign(module);
  topkube::bind_wire(module);
}
