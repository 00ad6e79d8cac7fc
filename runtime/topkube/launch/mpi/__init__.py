"""The MPI library on this machine: its command lines, mpiexec inside the launcher, its proxies inside workers."""
