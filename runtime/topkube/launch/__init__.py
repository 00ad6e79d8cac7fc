"""How ranks start, and how they end.

`mpi` finds mpiexec and builds its command line, `local` starts it on this machine and leaves no process behind,
`rank` is the
shim around each rank that keeps its log and reports how it ended, `report` says which rank failed first and why.
"""
