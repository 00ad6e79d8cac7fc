// Calls MPI_Finalize at the end of the process, but only if the process succeeded.
//
// A rank that fails must not enter MPI_Finalize: it would wait there for ranks that wait for it. Only libc reports the exit status,
// and only after Python has shut down. The extension does not link MPI: it gets the addresses of two MPI functions.
#include <stdlib.h>
#include <unistd.h>

#include "bindings/bind.hpp"

namespace topkube {
namespace {

struct MpiExit {
  int (*finalize)();
  int (*is_finalized)(int*);
  bool in_any_case;
  pid_t process;  // a forked child, such as a data loader's worker, must not finalize MPI
};

MpiExit mpi_exit;

[[maybe_unused]] void finalize_at_exit(int status, void*) {
  int done = 0;
  if (((status & 0xff) == 0 || mpi_exit.in_any_case) && getpid() == mpi_exit.process && mpi_exit.is_finalized(&done) == 0 && !done)
    mpi_exit.finalize();
}

// Registers the call. Returns false if the C library cannot pass the exit status.
bool finalize_on_success(std::uintptr_t finalize, std::uintptr_t is_finalized) {
#ifdef __GLIBC__
  mpi_exit = {reinterpret_cast<int (*)()>(finalize), reinterpret_cast<int (*)(int*)>(is_finalized), false, getpid()};
  return on_exit(finalize_at_exit, nullptr) == 0;
#else
  (void)finalize, (void)is_finalized;
  return false;
#endif
}

}  // namespace

void bind_exit(nb::module_& module) {
  module.def("finalize_on_success", &finalize_on_success, nb::arg("finalize"), nb::arg("is_finalized"));
  module.def("finalize_in_any_case", [] { mpi_exit.in_any_case = true; });
}

}  // namespace topkube
