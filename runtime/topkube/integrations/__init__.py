"""TopKube inside other libraries. A module imports its library only when it is used. No module needs MPI, unless its
documentation page states it."""
