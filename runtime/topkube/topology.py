"""The nodes of the ranks: detected from shared memory, or declared, so that one machine can act as several nodes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

from topkube.errors import WorldError

Nodes = tuple[tuple[int, ...], ...]
"""The ranks of each node, in rank order; nodes in the order of their first rank."""


def group_by_home(homes: Sequence[Hashable]) -> Nodes:
    """Return the nodes of ranks with these homes: ranks with equal homes share a node."""
    ranks: dict[Hashable, list[int]] = {}
    for rank, home in enumerate(homes):
        ranks.setdefault(home, []).append(rank)
    return tuple(map(tuple, ranks.values()))


def find_nodes_of_ranks(nodes: Nodes) -> list[int]:
    """Return the number of each rank's node."""
    homes = [0] * sum(map(len, nodes))
    for number, ranks in enumerate(nodes):
        for rank in ranks:
            homes[rank] = number
    return homes


def parse_declared_nodes(text: str, hosts: Sequence[Hashable]) -> list[int]:
    """Return the node of each rank as `TOPKUBE_RANKS_PER_NODE` declares it. Raises WorldError if the number of ranks
    does not fit, or if a node would span several hosts."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise WorldError(
            f"TOPKUBE_RANKS_PER_NODE={text!r} is not a list of whole numbers above 0",
            next_step="set it to the number of ranks of each node, for example 2,2",
        )
    if sum(counts) != len(hosts):
        raise WorldError(
            f"TOPKUBE_RANKS_PER_NODE={text} declares {sum(counts)} ranks, but there are {len(hosts)}",
            next_step=f"make the numbers add up to {len(hosts)}, or unset it to detect nodes from shared memory",
        )
    homes = [index for index, count in enumerate(counts) for _ in range(count)]
    for index, (start, count) in enumerate(zip(itertools.accumulate([0, *counts]), counts, strict=False)):
        if len(set(hosts[start : start + count])) > 1:
            raise WorldError(
                f"TOPKUBE_RANKS_PER_NODE={text} puts ranks {start} to {start + count - 1} on node {index},"
                " but they share no memory",
                cause="mpiexec placed these ranks on different hosts",
                next_step="unset it, or place ranks in blocks (mpiexec -ppn, --map-by slot)",
            )
    return homes
