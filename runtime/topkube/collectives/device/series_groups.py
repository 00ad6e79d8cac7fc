"""The groups of ranks through which a series of all-reduces on a device exchanges, and the sums over them."""

from __future__ import annotations

from typing import Any

from topkube.collectives.device.node_group import NodeGroup, find_node_group
from topkube.collectives.device.rank_group import RankGroup
from topkube.collectives.device.spanning_group import find_all_ranks_group, find_cross_group
from topkube.telemetry import phases
from topkube.world import World


class SeriesGroups:
    """The groups of this rank on `device`: the ranks of its node, and ranks of several nodes if NCCL carries the bytes
    between nodes. A group is made when it is first needed, and claimed until `release`. Sums are in the current stream
    of torch, and the host does not wait for them."""

    def __init__(self, world: World, device: Any) -> None:
        self._world, self._device = world, device
        self._node: NodeGroup | None = None
        self._between: RankGroup | None = None
        """The group of several nodes that the series uses."""

    @property
    def node(self) -> NodeGroup:
        """The ranks of this node. `claim_node` was called."""
        assert self._node is not None
        return self._node

    def claim_node(self) -> None:
        """Claim the group of this node for a series (see `RankGroup.claim`)."""
        if self._node is None:
            self._node = find_node_group(self._world, self._device)
        self._node.claim(self)

    def release(self) -> None:
        """Note that the series is over."""
        for group in (self._node, self._between):
            if group is not None:
                group.release()
        self._between = None

    def reduce_over_ranks(self, flat: Any, scale: float) -> None:
        """Replace `flat`, a 1-D tensor, by its sum over all ranks times `scale`."""
        world = self._world
        is_wide = flat.element_size() == 4
        if not is_wide and scale != 1:
            flat.mul_(scale)  # before the sum, because the sum of all ranks may exceed fp16
        if world.nodes == 1:
            self.node.all_reduce(flat)
        else:
            self._claim_between(find_all_ranks_group(world, self._device)).all_reduce(flat)
        if is_wide and scale != 1:
            flat.mul_(scale)
        sent = 2 * (world.size - 1) * flat.numel() * flat.element_size() // world.size
        between = sent // world.local_size if world.nodes > 1 else 0  # a ring enters and leaves each node once
        phases.current.sent(intra=sent - between, inter=between)

    def reduce_between_nodes(self, packed: Any) -> None:
        """Replace `packed` by its sum over the ranks of equal local rank on all nodes."""
        world = self._world
        if world.nodes == 1 or not packed.numel():
            return
        self._claim_between(find_cross_group(world, self._device)).all_reduce(packed)
        nbytes = packed.numel() * packed.element_size()
        phases.current.sent(inter=2 * (world.nodes - 1) * nbytes // world.nodes)

    def add_flag_over_ranks(self, flag: Any) -> None:
        """Replace `flag` by its sum over all ranks, by the groups that the series has used. Ranks without shards have
        nothing to add: they get the sum inside their node."""
        if self._world.nodes > 1 and self._between is not None:
            self._between.all_reduce(flag)
            if self._between.size == self._world.size:
                return
        if self._node is not None:
            self._node.all_reduce(flag)

    def _claim_between(self, group: RankGroup) -> RankGroup:
        group.claim(self)
        if self._between is not None and self._between is not group:
            self._between.release()
        self._between = group
        return group
