"""The start and the end of ranks.

`mpi/` finds mpiexec and builds its command line. `local` runs it on this machine. `rank` is the shim around each rank:
it writes the rank's log and a report of how the rank ended. Across pods, `launcher` and `worker` exchange messages over
`connection/`, and `verdict` finds what failed first. `output/` holds logs, reports and the output of pods.
"""
