"""Scripts whose ranks end in unusual ways, in pods and on one machine."""

from __future__ import annotations

LEAVES_WITH_0 = (
    "import os; from mpi4py.MPI import COMM_WORLD as world\n"
    "world.Barrier()\n"
    "if world.rank == 1: os._exit(0)\n"
    "world.allreduce(1); world.allreduce(1)"
)
"""Rank 1 ends with 0, without MPI_Finalize, while the others wait for it."""
LEAVES_A_DAEMON = (
    "import os; from mpi4py.MPI import COMM_WORLD as world\n"
    "os.system('setsid sleep 1000 > /dev/null 2>&1 &')\n"
    "world.Barrier(); print('the end')"
)
"""Each rank leaves a process in a session of its own, with the socket to MPI's proxy, which would wait for it."""
