"""Simulated links and times of steps, on which the choices of `auto` depend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import topkube
from ranks.training.scene import (
    compute_loss,
    draw_samples,
    take_own_part,
)
from topkube.collectives.link import MeasuredMachine
from topkube.training.exchange.tuning import machines
from topkube.training.exchange.tuning.step_times import COUNTED_STEPS, SKIPPED_STEPS
from topkube.training.exchange.tuning.tuning import Tuning
from topkube.world import World

STEPS = SKIPPED_STEPS + COUNTED_STEPS


def train(model: torch.nn.Module, optimizer: topkube.DistributedOptimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x, y = draw_samples(8 * topkube.size(), step)
        compute_loss(model, take_own_part(x), take_own_part(y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def have_same_choice(world: World, optimizer: topkube.DistributedOptimizer) -> bool:
    states = world.comm.allgather(repr(optimizer._backward.plan.save()))
    return all(state == states[0] for state in states)


@contextmanager
def distort_measured_links(world: World, factor: float) -> Iterator[None]:
    """Let the links of the world seem `factor` times as fast as they are."""
    measure = machines.measure_machines

    def measure_falsely(measured_world: World) -> MeasuredMachine:
        measured = measure(measured_world)
        rate = measured.rate and measured.rate * factor
        return MeasuredMachine(rate, measured.latency and measured.latency / factor, measured.memory)

    world.cache.pop("measured machines", None)
    machines.measure_machines = measure_falsely
    try:
        yield
    finally:
        machines.measure_machines = measure
        world.cache.pop("measured machines", None)


@contextmanager
def simulate_step_times(world: World, *seconds: float) -> Iterator[None]:
    """Let steps seem to take `seconds`, one value for each comparison. The exchanges seem long, and differ by rank; a
    rank that sends nothing to other nodes has none of these."""
    steps, note_step = iter(seconds), Tuning.note_step

    def note_times(
        self: Tuning, now: float, exchange: tuple[float, float], is_changing: bool = False
    ) -> list[float] | None:
        measured = note_step(self, now, exchange, is_changing)
        if measured is None:
            return None
        counted = [next(steps) - 0.01 * world.rank] * (len(measured) - 2)
        between = 0.2 + world.rank if world.cross_comm is not None else 0.0
        return [*counted, -between, -0.01 - world.rank]

    Tuning.note_step = note_times  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tuning.note_step = note_step  # type: ignore[method-assign]


SLOW_RATE = 1e6
"""The bytes per second of a simulated slow link."""


@contextmanager
def simulate_slow_links(world: World, *seconds: float) -> Iterator[None]:
    """Let the links of the world seem to carry SLOW_RATE, without a latency, and steps seem to take `seconds`. What
    `auto` tries then does not depend on this machine."""
    measure = machines.measure_machines

    def measure_slow(measured_world: World) -> MeasuredMachine:
        measured = measure(measured_world)
        return MeasuredMachine(measured.rate and SLOW_RATE, measured.latency and 1e-6, measured.memory)

    world.cache.pop("measured machines", None)
    machines.measure_machines = measure_slow
    try:
        with simulate_step_times(world, *seconds):
            yield
    finally:
        machines.measure_machines = measure
        world.cache.pop("measured machines", None)


def read_algorithm(optimizer: topkube.DistributedOptimizer) -> str:
    return optimizer.tuning.choice.algorithm.name if optimizer.tuning.choice is not None else ""


def mixes_small_tensors(optimizer: topkube.DistributedOptimizer) -> bool:
    """Return True if a small tensor shares a bucket with one that is not small."""
    return any(
        len({parameter.is_always_dense for parameter in bucket.parameters}) > 1
        for bucket in optimizer._backward.plan.buckets
    )
