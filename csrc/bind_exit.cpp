// The last thing a process does: end MPI in order, or leave it as it is.
//
// A rank that fails must not enter MPI_Finalize: it would wait there for ranks that wait for it. What the exit status is, only
// libc tells, and only once Python is gone. MPI stays outside of the extension: it is two addresses.
#include <stdlib.h>
#include <unistd.h>

#include "cpu/bind.hpp"

namespace topkube {
namespace {

struct Ending {
  int (*finalize)();
  int (*is_finalized)(int*);
  bool whatever_status;
  pid_t process;  // a fork of it, such as a data loader's worker, leaves MPI alone
};

Ending ending;

[[maybe_unused]] void end_of_process(int status, void*) {
  int done = 0;
  if (((status & 0xff) == 0 || ending.whatever_status) && getpid() == ending.process && ending.is_finalized(&done) == 0 && !done) ending.finalize();
}

// Whether the C library will call us with the exit status.
bool finalize_on_success(std::uintptr_t finalize, std::uintptr_t is_finalized) {
#ifdef __GLIBC__
  ending = {reinterpret_cast<int (*)()>(finalize), reinterpret_cast<int (*)(int*)>(is_finalized), false, getpid()};
  return on_exit(end_of_process, nullptr) == 0;
#else
  (void)finalize, (void)is_finalized;
  return false;
#endif
}

}  // namespace

void bind_exit(nb::module_& module) {
  module.def("finalize_on_success", &finalize_on_success, nb::arg("finalize"), nb::arg("is_finalized"));
  module.def("finalize_in_any_case", [] { ending.whatever_status = true; });
}

}  // namespace topkube
