// The extension module topkube._kernels. It works on arrays only: it uses neither MPI nor torch.
#include "bindings/bind.hpp"

NB_MODULE(_kernels, m) {
  m.doc() = "TopKube's compiled kernels; use topkube.kernels.";
  topkube::bind_exit(m);
  topkube::bind_records(m);
  topkube::bind_paths(m);
  topkube::bind_quantised(m);
  topkube::bind_reduction(m);
  topkube::bind_node(m);
  topkube::bind_selection(m);
  topkube::bind_sign(m);
  topkube::bind_wire(m);
}
