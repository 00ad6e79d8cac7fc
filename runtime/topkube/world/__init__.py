"""The world of ranks: MPI communicators, the nodes, the place of this rank, and waits with a deadline.

Only mpi4py calls MPI. MPI runs with MPI_THREAD_MULTIPLE, because training exchanges gradients on a separate thread.
Ranks that share memory form a node. `TOPKUBE_RANKS_PER_NODE=2,2` declares the nodes instead, so that one machine can
act as several nodes. `world` has the class, `creation` makes worlds, and `process` has the world of all ranks.
"""

from topkube.world.creation import create_sub_world
from topkube.world.process import current, init, local_rank, local_size, node, nodes, rank, shutdown, size
from topkube.world.world import WaitSeries, World, leave_waits

__all__ = [
    "WaitSeries",
    "World",
    "create_sub_world",
    "current",
    "init",
    "leave_waits",
    "local_rank",
    "local_size",
    "node",
    "nodes",
    "rank",
    "shutdown",
    "size",
]
