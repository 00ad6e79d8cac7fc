"""The two stages of an all-reduce inside the node, for tensors on a device: reduce to shards, and gather the shards.

Both are called on the stream of `memory`. Every rank of the node calls them in the same order.
"""

from __future__ import annotations

import itertools
from typing import Any

from topkube.collectives.call import compute_shard_bounds, find_own_shard
from topkube.collectives.device.memory import DeviceMemory, Slot
from topkube.collectives.device.node_group import NodeGroup
from topkube.telemetry import phases
from topkube.world import World


def reduce_in_node(
    world: World, group: NodeGroup, memory: DeviceMemory, slot: Slot, flat: Any, scale: float
) -> tuple[Any, Any]:
    """Reduce `flat`, a 1-D tensor, inside the node. Return (padded, shard).

    `shard` is this rank's shard of the node's sum times `scale`. `padded` is `flat` itself, or a copy of it in which
    all shards have the same length: `gather_in_node` needs it. Both may be in memory of `slot`.
    """
    is_narrow = flat.dtype != memory.float32
    if is_narrow and scale != 1:
        flat.mul_(scale)  # before the sum, because the sum of all ranks may exceed fp16
    if world.local_size == 1:
        padded = shard = flat
    elif world.local_size != world.shards:  # nodes of different sizes: shards and ranks do not match
        group.all_reduce(flat)
        first, last = find_own_shard(world, flat.numel())
        padded, shard = flat, flat[first:last]
    else:
        part_length = -(-flat.numel() // world.shards)
        padded = _cut_in_parts(memory, slot, flat, part_length, world.shards)
        shard = memory.find_buffer(slot, "shard", part_length, flat.dtype)
        group.reduce_scatter(shard, padded)
        first, last = find_own_shard(world, flat.numel())
        shard = shard[: last - first]
    if not is_narrow and scale != 1:
        shard.mul_(scale)
    return padded, shard


def gather_in_node(world: World, group: NodeGroup, memory: DeviceMemory, slot: Slot, flat: Any, padded: Any) -> None:
    """Gather the shards of all ranks of the node into `flat`. `padded` is what `reduce_in_node` returned for `slot`."""
    if world.local_size == 1:
        return
    if world.local_size != world.shards:
        for root, (start, stop) in enumerate(itertools.pairwise(compute_shard_bounds(flat.numel(), world.shards))):
            group.broadcast(flat[start:stop], root)
        return
    part_length = padded.numel() // world.shards
    shard = memory.find_buffer(slot, "shard", part_length, flat.dtype)  # begins with the shard that was reduced
    group.all_gather(padded, shard)
    if padded is not flat:
        for i, (start, stop) in enumerate(itertools.pairwise(compute_shard_bounds(flat.numel(), world.shards))):
            flat[start:stop].copy_(padded[i * part_length : i * part_length + stop - start])
    phases.current.sent(intra=(world.local_size - 1) * part_length * flat.element_size())


def _cut_in_parts(memory: DeviceMemory, slot: Slot, flat: Any, part_length: int, shards: int) -> Any:
    """Return `flat` itself if its `shards` shards all have `part_length` elements, else a copy in which they are
    padded to `part_length` elements."""
    if flat.numel() == part_length * shards:
        return flat
    padded = memory.find_buffer(slot, "padded", part_length * shards, flat.dtype)
    for i, (start, stop) in enumerate(itertools.pairwise(compute_shard_bounds(flat.numel(), shards))):
        padded[i * part_length : i * part_length + stop - start].copy_(flat[start:stop])
        padded[i * part_length + stop - start : (i + 1) * part_length].zero_()
    return padded
