"""The measured machines and links of a world, on which all ranks agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from topkube.algorithms import Machines
from topkube.collectives.link import measure_machines
from topkube.training.ranks.agreement import Agreement
from topkube.world import World

RunAgreement = Callable[[Callable[[Agreement], Any]], Any]
"""Runs an agreement of all ranks in the communication thread, in order with the exchanges, and waits for it."""
_KEY = "measured machines"
"""The key of the measurement in the world's cache."""


def agree_on_machines(world: World, run_agreement: RunAgreement, measure_nccl: Callable[[], float | None]) -> Machines:
    """Return the machines of the slowest node and the slowest link, measured once per world. `measure_nccl` returns the
    bytes per second that a node sends through NCCL. All ranks call this together."""
    if _KEY not in world.cache:
        world.cache[_KEY] = _measure(world, run_agreement, measure_nccl)
    machines: Machines = world.cache[_KEY]
    return machines


def _measure(world: World, run_agreement: RunAgreement, measure_nccl: Callable[[], float | None]) -> Machines:
    own = run_agreement(lambda _: measure_machines(world))
    nccl = run_agreement(lambda _: measure_nccl())
    worst = [-own.rate if own.rate else -math.inf, own.latency or 0.0, -own.memory, -(nccl or 0.0)]
    rate, latency, memory, nccl = run_agreement(lambda agreement: agreement.maximum(worst))
    slots = max(map(len, world.node_ranks))
    link = -float(rate) * world.shards
    return Machines(world.nodes, slots, link, -float(memory), float(latency), -float(nccl) or None)
