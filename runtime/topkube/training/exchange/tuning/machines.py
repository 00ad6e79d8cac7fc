"""The measured machines and links of a world, on which all ranks agree."""

from __future__ import annotations

import math
from collections.abc import Callable

from topkube.algorithms import Machines
from topkube.collectives.device.rates import DeviceRates
from topkube.collectives.link import measure_machines
from topkube.training.ranks.queued_agreement import QueuedAgreement
from topkube.world import World

_KEY = "measured machines"
"""The key of the measurements in the world's cache."""


def agree_on_machines(
    world: World, agreement: QueuedAgreement, is_on_device: bool, measure_device: Callable[[], DeviceRates | None]
) -> Machines:
    """Return the cluster as its slowest node and its slowest link, measured once per world for gradients in host memory
    and once for those on GPUs (`is_on_device`). `measure_device` returns what this rank measures on the GPU that
    reduces its gradients, None without one. All ranks call this together."""
    measured: dict[bool, Machines] = world.cache.setdefault(_KEY, {})
    if is_on_device not in measured:
        measured[is_on_device] = _measure(world, agreement, measure_device)
    return measured[is_on_device]


def _measure(world: World, agreement: QueuedAgreement, measure_device: Callable[[], DeviceRates | None]) -> Machines:
    own = agreement.run(lambda _: measure_machines(world))
    device = agreement.run(lambda _: measure_device())
    nccl = device.nccl_link if device is not None else None
    # Each rank of a node has a GPU of its own.
    own_memory = own.memory if device is None else device.memory * world.local_size
    # Rates are negative: their maximum over the ranks is the lowest rate.
    worst = [-own.rate if own.rate else -math.inf, own.latency or 0.0, -own_memory, -(nccl or 0.0), world.crowding]
    rate, latency, memory, nccl, crowding = agreement.maximum(worst)
    slots = world.largest_node
    link = -float(rate) * world.shards
    nccl_link = -float(nccl) or None
    return Machines(world.nodes, slots, link, -float(memory), float(latency), nccl_link, float(crowding))
