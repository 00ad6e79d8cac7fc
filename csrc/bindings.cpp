// The extension's Python face. It knows arrays only: no MPI, no torch.
#include "cpu/bind.hpp"

NB_MODULE(_kernels, m) {
  m.doc() = "TopKube's compiled kernels; use topkube.kernels.";
  topkube::bind_exit(m);
  topkube::bind_gather(m);
  topkube::bind_path(m);
  topkube::bind_reduce(m);
  topkube::bind_shared_memory(m);
  topkube::bind_select(m);
  topkube::bind_wire(m);
}
