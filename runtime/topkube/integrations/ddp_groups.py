"""The ranks that a hook averages over, by node, and the process groups through which they exchange gradients."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch.distributed as dist

from topkube.environment import read_torch_local_size
from topkube.errors import ArgumentError, TrainingError


@dataclass(frozen=True)
class NodeRanks:
    """The members of a process group, by node. `nodes` holds the ranks of each node in the world of all ranks, in the
    order of the group. `process_group` is None for the group of all ranks."""

    process_group: Any
    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def find(cls, process_group: Any, ranks_per_node: int | None) -> NodeRanks:
        """Divide `process_group` into nodes: by LOCAL_WORLD_SIZE, or into nodes of `ranks_per_node` members. Raises
        TrainingError if this rank is no member, and ArgumentError if `ranks_per_node` is not positive."""
        if ranks_per_node is not None and ranks_per_node < 1:
            raise ArgumentError(f"ranks_per_node is {ranks_per_node}", next_step="pass 1 or more")
        if process_group is dist.group.WORLD:
            process_group = None
        if dist.get_rank(process_group) < 0:
            raise TrainingError(
                f"rank {dist.get_rank()} is not a member of process_group",
                next_step="call ddp_hook on the members of a process group only",
            )
        members = list(enumerate(dist.get_process_group_ranks(process_group)))
        if ranks_per_node is not None:
            divided = groupby(members, lambda member: member[0] // ranks_per_node)
        else:
            local_size = read_torch_local_size() or 1  # launchers number the ranks node by node
            divided = groupby(members, lambda member: member[1] // local_size)
        return cls(process_group, tuple(tuple(rank for _, rank in node) for _, node in divided))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All members, in the order of the group."""
        return tuple(chain.from_iterable(self.nodes))

    def check(self) -> None:
        """Raise ArgumentError if nodes have different numbers of ranks."""
        if len({len(node) for node in self.nodes}) > 1:
            raise ArgumentError(
                f"{len(self.ranks)} ranks cannot be divided into nodes with the same number of ranks: they are"
                f" {', '.join(map(str, map(list, self.nodes[:16])))}",
                cause="nodes have different numbers of ranks, or ranks_per_node does not divide the number of ranks",
                next_step="start the same number of ranks on every node, or pass ranks_per_node",
            )

    def open_groups(self) -> tuple[Any, Any]:
        """Return a new group of the ranks of this node, and one of the ranks with the same place on all nodes. A
        collective of all members."""
        in_node, across = list(self.nodes), list(zip(*self.nodes, strict=True))
        return self._open(in_node), self._open(across)

    def _open(self, parts: list[tuple[int, ...]]) -> Any:
        own = next(index for index, part in enumerate(parts) if dist.get_rank() in part)
        if self.process_group is None:
            # Every rank makes every group, in the same order.
            return [dist.new_group(list(part)) for part in parts][own]
        # Ranks outside of the process group take no part.
        backend = dist.get_backend_config(self.process_group)
        return dist.new_group(list(parts[own]), backend=backend, use_local_synchronization=True)
