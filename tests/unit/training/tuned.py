"""Tunings of simulated ranks, which have measured machines and compare steps with given times."""

from __future__ import annotations

from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

from topkube.algorithms import BucketSize, Machines, list_compressed_choices
from topkube.settings import Settings
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.tuning import machines
from topkube.training.exchange.tuning.step_times import COUNTED_STEPS
from topkube.training.exchange.tuning.tuning import Tuning

GIGABIT = 125e6
DENSE = "hierarchical"
BUCKETS = [BucketSize(5_000_000), BucketSize(2_000, small=True)]


def build_machines(link: float = GIGABIT, nodes: int = 2, nccl: float | None = None) -> Machines:
    return Machines(nodes, 2, link, memory=10e9 if nccl is None else 1e12, latency=50e-6, nccl_link=nccl)


def measure_and_choose(
    monkeypatch: Any, link: float, name: str = "auto", wire: str = "fp32", nodes: int = 2, nccl: float | None = None
) -> Tuning:
    """Return the tuning of a rank that measured a link of `link` bytes per second and has chosen."""
    world = SimpleNamespace(
        nodes=nodes, rank=1, shards=2, node_ranks=[(0, 1)] * nodes, cache={}, run_directory=None, size=2 * nodes
    )
    monkeypatch.setattr(machines, "_measure", lambda *_: build_machines(link, nodes, nccl))
    settings = AggregationSettings.from_settings(Settings(), algorithm=name, dense_wire=wire)
    tuned = Tuning(world, settings, None, is_on_device=nccl is not None)  # type: ignore[arg-type]
    tuned.choose(BUCKETS)
    return tuned


def read_prediction(tuned: Tuning) -> tuple[float, float]:
    assert tuned.choice is not None
    return tuned.choice.between, tuned.choice.inside


def decide(tuned: Tuning, step: float, between: float, inside: float, spread: float = 0.0) -> bool:
    """Let the ranks measure COUNTED_STEPS steps around `step`, whose interquartile range is about `spread`."""
    steps = [step + spread / 1.349 * NormalDist().inv_cdf((i + 0.5) / COUNTED_STEPS) for i in range(COUNTED_STEPS)]
    return tuned.decide([*steps, -between, -inside], BUCKETS)


def build_compressing(
    monkeypatch: Any, link: float = GIGABIT, name: str = "auto", node_weights: str = "equal", **options: Any
) -> Tuning:
    """Return the tuning of a rank whose `auto` may also choose algorithms that compress."""
    tuned = measure_and_choose(monkeypatch, link, name, **options)
    tuned.compressed_choices = list_compressed_choices(node_weights)
    return tuned
