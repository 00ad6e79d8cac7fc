"""The variables by which torch.distributed finds its ranks, with the names that torchrun gives them. Scripts for DDP or
FSDP then run unchanged."""

from __future__ import annotations

import itertools
import socket

from topkube.settings import Settings

MASTER_ADDRESS, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
DEFAULT_PORT = 29500
"""The port of rank 0 in a pod, as with torchrun. A job's container may set another MASTER_PORT."""


def rank_variables(rank: int, settings: Settings) -> dict[str, str]:
    """Return the variables of `rank`: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, and GROUP_RANK for its node.
    Return nothing if the launcher's number of ranks is unknown, as with plain mpiexec."""
    try:
        counts = [int(count) for count in settings.ranks_per_node.split(",")]
    except ValueError:
        return {}
    ends = list(itertools.accumulate(counts))
    if sum(counts) != settings.expected_ranks or not 0 <= rank < ends[-1]:
        return {}
    node = next(number for number, end in enumerate(ends) if rank < end)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ends[-1]),
        "LOCAL_RANK": str(rank - (ends[node] - counts[node])),
        "LOCAL_WORLD_SIZE": str(counts[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(counts)),
    }


def free_port() -> int:
    """Return a TCP port that no process of this machine listens on now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
