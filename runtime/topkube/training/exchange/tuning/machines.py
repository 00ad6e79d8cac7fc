"""The measured machines and links of a world, on which all ranks agree."""

from __future__ import annotations

import math
from collections.abc import Callable

from topkube.algorithms import Machines
from topkube.collectives.link import measure_machines
from topkube.training.ranks.queued_agreement import QueuedAgreement
from topkube.world import World

_KEY = "measured machines"
"""The key of the measurement in the world's cache."""


def agree_on_machines(world: World, agreement: QueuedAgreement, measure_nccl: Callable[[], float | None]) -> Machines:
    """Return the cluster as its slowest node and its slowest link, measured once per world. `measure_nccl` returns the
    bytes per second that a node sends through NCCL, None without a measurement. All ranks call this together."""
    if _KEY not in world.cache:
        world.cache[_KEY] = _measure(world, agreement, measure_nccl)
    machines: Machines = world.cache[_KEY]
    return machines


def _measure(world: World, agreement: QueuedAgreement, measure_nccl: Callable[[], float | None]) -> Machines:
    own = agreement.run(lambda _: measure_machines(world))
    nccl = agreement.run(lambda _: measure_nccl())
    # Rates are negative: their maximum over the ranks is the lowest rate.
    worst = [-own.rate if own.rate else -math.inf, own.latency or 0.0, -own.memory, -(nccl or 0.0), world.crowding]
    rate, latency, memory, nccl, crowding = agreement.maximum(worst)
    slots = max(map(len, world.node_ranks))
    link = -float(rate) * world.shards
    nccl_link = -float(nccl) or None
    return Machines(world.nodes, slots, link, -float(memory), float(latency), nccl_link, float(crowding))
