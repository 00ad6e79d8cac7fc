"""The world of ranks: MPI communicators, nodes and this rank's place in them. Thin first version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from topkube.errors import WorldError
from topkube.settings import Settings


@dataclass
class World:
    """Communicators and topology.

    `node_comm` joins the ranks of this node; `cross_comm` joins the ranks of equal local rank on all nodes, None for surplus
    ranks (local_rank >= shards). `shards` is the smallest number of ranks on any node: a bucket is cut into that many shards.
    """

    comm: Any
    node_comm: Any
    cross_comm: Any
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    shards: int
    node_ranks: tuple[tuple[int, ...], ...]
    deadline_seconds: float


_world: World | None = None


def init(settings: Settings | None = None) -> World:
    """Starts MPI if needed and learns the topology; a second call returns the same world."""
    global _world
    if _world is not None:
        return _world
    settings = settings or Settings.from_environment()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    if settings.ranks_per_node:
        counts = [int(part) for part in settings.ranks_per_node.split(",")]
        if sum(counts) != comm.size:
            raise WorldError(
                f"TOPKUBE_RANKS_PER_NODE={settings.ranks_per_node} declares {sum(counts)} ranks, there are {comm.size}"
            )
        node = next(i for i in range(len(counts)) if comm.rank < sum(counts[: i + 1]))
    else:
        leaders = sorted(set(comm.allgather(shared.bcast(comm.rank))))
        node = leaders.index(shared.bcast(comm.rank))
    node_comm = comm.Split(node, comm.rank)
    homes = comm.allgather(node)
    node_ranks = tuple(tuple(r for r, n in enumerate(homes) if n == i) for i in range(max(homes) + 1))
    shards = min(len(ranks) for ranks in node_ranks)
    cross = comm.Split(node_comm.rank if node_comm.rank < shards else MPI.UNDEFINED, comm.rank)
    _world = World(
        comm,
        node_comm,
        None if cross == MPI.COMM_NULL else cross,
        comm.rank,
        comm.size,
        node_comm.rank,
        node_comm.size,
        node,
        len(node_ranks),
        shards,
        node_ranks,
        settings.deadline_seconds,
    )
    return _world


def current() -> World:
    """The world that `init` made. Raises WorldError before that."""
    if _world is None:
        raise WorldError("topkube.init() has not been called", next_step="call topkube.init() at the top of the script")
    return _world


def rank() -> int:
    return current().rank


def size() -> int:
    return current().size


def local_rank() -> int:
    return current().local_rank


def local_size() -> int:
    return current().local_size


def node() -> int:
    return current().node


def nodes() -> int:
    return current().nodes
