"""The seconds of a step by phase."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from ranks.training.scene import build_optimizer
from topkube.telemetry import phases
from topkube.telemetry.phases import PHASES
from topkube.world import World

WIDTH, STEPS = 700, 6


def _train(*layers: nn.Module, **options: Any) -> tuple[dict[str, float], float, float]:
    """Train layers one after another, each with an optimizer of its own. Return the seconds per phase, those of all
    steps, and those of the calls of `step()`."""
    optimizers = [build_optimizer(layer, torch.optim.Adam, **options) for layer in layers]
    batches, in_steps = [torch.ones(1, WIDTH)] * STEPS, 0.0
    phases.current.take()
    start = time.perf_counter()
    for x in optimizers[0].join(batches):
        nn.Sequential(*layers)(x).pow(2).mean().backward()
        step_start = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        in_steps += time.perf_counter() - step_start
        for optimizer in optimizers:
            optimizer.zero_grad()
    seconds, whole = phases.current.take().seconds, time.perf_counter() - start
    for optimizer in optimizers:
        optimizer.unwrap()
    return seconds, whole, in_steps


def _build_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]


def _check_parts(seconds: dict[str, float], whole: float) -> None:
    assert set(seconds) <= set(PHASES)
    parts = {phase: seconds.get(phase, 0.0) for phase in ("data", "forward", "backward", "update")}
    assert min(parts.values()) > 0, parts
    assert sum(parts.values()) <= whole, (parts, whole)


def case_updates_of_dear_count_once(world: World) -> None:
    """They are made in the next forward."""
    seconds, whole, _ = _train(nn.Sequential(*_build_layers()), overlap="dear")
    _check_parts(seconds, whole)


def case_backwards_of_two_optimizers_count_once(world: World) -> None:
    seconds, whole, _ = _train(*_build_layers())
    _check_parts(seconds, whole)


def case_exchanges_of_weights_are_part_of_the_update(world: World) -> None:
    seconds, whole, in_steps = _train(nn.Sequential(*_build_layers()), aggregation="localsgd")
    _check_parts(seconds, whole)
    assert seconds["update"] > 0.8 * in_steps, (seconds, in_steps)
