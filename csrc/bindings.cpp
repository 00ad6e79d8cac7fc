// The extension's Python face. It knows arrays only: no MPI, no torch.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_kernels, m) {
  m.doc() = "TopKube's compiled kernels; use topkube.kernels.";
}
