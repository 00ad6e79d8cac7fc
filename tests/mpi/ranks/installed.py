"""Cases with the algorithm of docs/new-algorithm.md, which is installed beside TopKube (test_installed.py)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

import topkube
from ranks.device import exchange_through_torch
from ranks.training.scene import (
    are_equal_on_all_ranks,
    build_network,
    build_optimizer,
    compute_loss,
    copy_weights,
    draw_samples,
    take_own_part,
)
from topkube import algorithms, collectives
from topkube.bench import allreduce as bench
from topkube.bench.bench_arrays import HostArrays
from topkube.world import World

NAME = "acme.stride-k"


def build_slow_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with a low rate. Each step sends a tenth of the entries, and the others wait for up to ten steps, so a
    rate that suits dense training would overshoot."""
    return torch.optim.SGD(parameters, lr=0.02)


def train(steps: int) -> tuple[list[float], list[torch.Tensor]]:
    model = build_network()
    optimizer = build_optimizer(model, build_slow_sgd, aggregation=NAME, density=0.1)
    losses = []
    for step in range(steps):
        x, y = draw_samples(8 * topkube.size(), step)
        loss = compute_loss(model, take_own_part(x), take_own_part(y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(topkube.reduce(loss.item(), "mean")))
    assert optimizer.state_dict()["topkube"]["residuals"]["pieces"], "nothing was kept back"
    return losses, copy_weights(model)


def case_training_with_it_learns_and_keeps_the_weights_of_all_ranks_equal(world: World) -> None:
    losses, final = train(40)
    assert are_equal_on_all_ranks(final)
    assert losses[-1] < 0.5 * losses[0], losses


def case_training_with_it_on_a_device_learns_and_keeps_the_weights_of_all_ranks_equal(world: World) -> None:
    with exchange_through_torch():
        losses, final = train(40)
    assert are_equal_on_all_ranks(final)
    assert losses[-1] < 0.5 * losses[0], losses


def case_nothing_is_lost_and_a_nan_changes_no_residual(world: World) -> None:
    length = 10_001
    residual = collectives.new_residual(NAME, length)
    summed, received = np.zeros(length), np.zeros(length)
    for step in range(6):
        x = np.random.default_rng([step, world.rank]).standard_normal(length).astype(np.float32)
        summed += topkube.reduce(x.astype(np.float64))
        received += topkube.allreduce_(x, "sum", NAME, 0.05, residual=residual)
    kept = np.zeros(length)
    start, stop = collectives.residual_range(algorithms.find_algorithm(NAME), world, length)
    kept[start:stop] = residual.current
    np.testing.assert_allclose(received + topkube.reduce(kept), summed, atol=1e-3)
    before = residual.current.tobytes()
    poisoned = np.ones(length, np.float32)
    if world.rank == 0:
        poisoned[length // 2] = np.nan
    topkube.allreduce_(poisoned, "sum", NAME, 0.05, residual=residual)
    assert residual.current.tobytes() == before


def case_at_density_1_it_is_dense(world: World) -> None:
    for dtype in (np.float32, np.float16):
        for length in (1, 3, 1000):
            rows = np.random.default_rng(length).integers(-8, 9, (world.size, length)).astype(dtype)
            x = rows[world.rank].copy()
            topkube.allreduce_(x, "sum", NAME, 1.0)
            assert (x == rows.sum(0)).all()


def case_the_benchmark_measures_and_checks_it(world: World) -> None:
    assert NAME in bench.list_names("", HostArrays())
    report = bench.measure(world, 200_000, [NAME, "hitopk", "hierarchical"], 0.01, "fp32", "fp32", 1)
    if world.rank == 0:
        rows = {row["algorithm"]: row for row in report.rows}
        assert all(row["right"] for row in rows.values()), rows
        assert rows[NAME]["inter_mb"] * 1e6 == 8 * 1000  # two shards of 1,000 values, half of each twice
