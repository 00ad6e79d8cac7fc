"""This process's place among ranks and nodes; a process without `topkube.init` is alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from topkube.errors import WorldError
from topkube.settings import launched_ranks
from topkube.world import current


@dataclass(frozen=True)
class Place:
    """`world` is None where there is one rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node: int = 0
    node_ranks: tuple[tuple[int, ...], ...] = ((0,),)
    world: Any = None

    @property
    def local_size(self) -> int:
        return len(self.node_ranks[self.node])

    def home(self, shard: int) -> int:
        """The rank that fetches the shard from the remote."""
        nodes = len(self.node_ranks)
        return self._on(shard % nodes, shard // nodes)

    def bringer(self, shard: int) -> int:
        """The rank that puts the shard into this node's cache."""
        return self._on(self.node, shard // len(self.node_ranks))

    def _on(self, node: int, turn: int) -> int:
        ranks = self.node_ranks[node]
        return ranks[turn % len(ranks)]


def here() -> Place:
    """Where this process is. Raises WorldError where several ranks were started and `topkube.init` was not called."""
    try:
        world = current()
    except WorldError:
        if launched_ranks()[1] > 1:
            raise
        return Place()
    if world.size == 1:
        return Place()
    return Place(world.rank, world.size, world.local_rank, world.node, world.node_ranks, world)
