"""The place of this process among ranks and nodes. A process that did not call `topkube.init` is the only rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from topkube.environment import read_process_launch
from topkube.errors import WorldError
from topkube.world import current


@dataclass(frozen=True)
class RankPlace:
    """The place of a rank. `node_ranks` has the ranks of each node. `world` is None if there is one rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node: int = 0
    node_ranks: tuple[tuple[int, ...], ...] = ((0,),)
    world: Any = None

    @property
    def local_size(self) -> int:
        """The number of ranks on this node."""
        return len(self.node_ranks[self.node])

    def find_home_rank(self, shard: int) -> int:
        """Return the rank that fetches the shard from the remote."""
        nodes = len(self.node_ranks)
        return self._pick_rank(shard % nodes, shard // nodes)

    def find_filling_rank(self, shard: int) -> int:
        """Return the rank that puts the shard into the cache of this node."""
        return self._pick_rank(self.node, shard // len(self.node_ranks))

    def list_requesters(self, shards: int) -> list[int]:
        """Return the ranks of other nodes that request one of `shards` shards from this rank, because this rank fetches
        it from the remote. With equal nodes, this is one rank of each node."""
        own = np.asarray(self.node_ranks[self.node])
        numbers = np.arange(self.node, shards, len(self.node_ranks)) // len(self.node_ranks)
        numbers = numbers[own[numbers % own.size] == self.rank]
        requesters: list[int] = []
        for node, ranks in enumerate(self.node_ranks):
            if node != self.node:
                requesters += np.asarray(ranks)[np.unique(numbers % len(ranks))].tolist()
        return requesters

    def _pick_rank(self, node: int, number: int) -> int:
        ranks = self.node_ranks[node]
        return ranks[number % len(ranks)]


def find_place() -> RankPlace:
    """Return the place of this process. Raises WorldError if several ranks were started and `topkube.init` was not
    called."""
    try:
        world = current()
    except WorldError:
        if read_process_launch().ranks > 1:
            raise
        return RankPlace()
    if world.size == 1:
        return RankPlace()
    return RankPlace(world.rank, world.size, world.local_rank, world.node, world.node_ranks, world)
