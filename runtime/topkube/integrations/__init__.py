"""TopKube inside other libraries. A module imports its library only when it is used, and needs no MPI unless its page
says so."""
