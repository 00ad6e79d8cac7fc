"""Every algorithm of the catalogue trains: the loss falls, all ranks agree, a NaN changes nothing, and runs repeat and
resume bit for bit. So do runs with a schedule, which changes the algorithm, the density or the period."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import topkube
from ranks.training.checkpoints import make_shared_directory
from ranks.training.onebit_scene import (
    build_adamw,
    build_sgd,
    draw_batch,
    read_agreed_weights,
    read_bits,
    train,
    train_with_checkpoints,
)
from ranks.training.scene import (
    DeliveredGradients,
    are_equal_on_all_ranks,
    build_network,
    build_plain_sgd,
    compute_loss,
    copy_weights,
)
from topkube.algorithms import OWN, PERIOD, Algorithm, Stage
from topkube.collectives.overlapped import OverlappedAllReduce
from topkube.errors import TrainingError
from topkube.training.exchange.reduction.overlapped_buckets import OverlappedBuckets
from topkube.world import World

IN_HOST_MEMORY = [algorithm for algorithm in OWN if not algorithm.needs_gpu]


def build_optimizer(model: nn.Module, algorithm: Any, make: Any = build_sgd) -> topkube.DistributedOptimizer:
    period = 2 if PERIOD in algorithm.parameters else 1
    return topkube.DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters(),
        aggregation=algorithm.name,
        density=0.1,
        period=period,
        outer_momentum=0.3,  # at a period of two, 0.9 would make steps ten times as long
        bucket_bytes=8192,
    )


def choose_algorithms(world: World) -> list[Algorithm]:
    """Return the algorithms that run in this world, so that each runs in two worlds: all of them on uneven nodes; on
    three nodes those that take two stages there, and one of each family; the rest on even nodes."""
    if len({len(ranks) for ranks in world.node_ranks}) > 1:
        return IN_HOST_MEMORY
    on_three_nodes = {"localsgd", "diloco", "onebit", "hitopk", "gtopk", "hierarchical"}
    return [algorithm for algorithm in IN_HOST_MEMORY if (algorithm.name in on_three_nodes) == (world.nodes > 2)]


def compute_held_out_loss(model: nn.Module) -> float:
    x = torch.randn(256, 24, generator=torch.Generator().manual_seed(77))
    with torch.no_grad():
        return float(compute_loss(model, x, x[:, :1] * 2 - x[:, 1:2]))


def case_every_algorithm_trains(world: World) -> None:
    for algorithm in choose_algorithms(world):
        model = build_network()
        before = compute_held_out_loss(model)
        optimizer = build_optimizer(model, algorithm)
        train(world, model, optimizer, range(24))
        with optimizer.consensus():
            after = compute_held_out_loss(model)
            assert are_equal_on_all_ranks(copy_weights(model)), algorithm.name
        assert after < before / 2, (algorithm.name, before, after)
        optimizer.unwrap()


def case_a_nan_on_one_rank_changes_nothing(world: World) -> None:
    for algorithm in choose_algorithms(world):
        model = build_network()
        optimizer = build_optimizer(model, algorithm, build_adamw)
        train(world, model, optimizer, range(3))
        before = read_bits(optimizer, model)
        loss = compute_loss(model, *draw_batch(world.rank, 3))
        (loss * torch.nan if world.rank == world.size - 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (optimizer.steps, optimizer.skipped_steps) == (3, 1), algorithm.name
        assert read_bits(optimizer, model) == before, algorithm.name
        optimizer.unwrap()


def case_runs_repeat_and_resume_bit_for_bit(world: World) -> None:
    """The checkpoint of step 5 lies between two exchanges of the algorithms that exchange every two steps."""
    for algorithm in choose_algorithms(world):
        ends = []
        for parts in ([12], [5, 12]):
            with make_shared_directory(world) as directory:
                for total in parts:
                    model = build_network()
                    optimizer = build_optimizer(model, algorithm, build_adamw)
                    train_with_checkpoints(world, model, optimizer, directory, total, every=5)
                    last = read_bits(optimizer, model)
                    optimizer.unwrap()
                ends.append(last)
        assert ends[0] == ends[1], algorithm.name


def train_six_layers(world: World, algorithm: str) -> list[torch.Tensor]:
    """Train six layers, each with a bucket of its own, and return the weights. In the second half, a layer is frozen
    while it still owes a part of its gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(6)))
    optimizer = topkube.DistributedOptimizer(
        build_plain_sgd(model.parameters()), model.named_parameters(), aggregation=algorithm, bucket_bytes=48 * 48 * 4
    )
    for step in range(6):
        model[2].weight.requires_grad_(step < 3)
        x = torch.randn(4, 48, generator=torch.Generator().manual_seed(100 * step + world.rank))
        loss = model(x).square().mean()
        (loss * torch.nan if step == 4 and world.rank == 0 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (optimizer.steps, optimizer.skipped_steps) == (5, 1)
    weights = copy_weights(model)
    assert are_equal_on_all_ranks(weights)
    optimizer.unwrap()
    return weights


def case_compressed_buckets_that_travel_together_have_the_same_bits(world: World) -> None:
    """The messages of a bucket travel while the next buckets start. The result is that of one bucket after another."""
    if world.nodes == 1:
        return
    under_way, begin = list[int](), OverlappedAllReduce.begin_exchange

    def count(all_reduce: OverlappedAllReduce, *args: Any) -> None:
        under_way.append(len(all_reduce._under_way))
        begin(all_reduce, *args)

    for algorithm in ("int8", "int4", "int3"):
        under_way.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OverlappedAllReduce, "begin_exchange", count)
            together = train_six_layers(world, algorithm)
            assert under_way, "no bucket travelled beside others"
            patch.setattr(OverlappedBuckets, "can_compress", lambda *_: False)
            one_by_one = train_six_layers(world, algorithm)
        assert all(torch.equal(a, b) for a, b in zip(together, one_by_one, strict=True)), algorithm


# ---- schedules


def build_scheduled(
    model: nn.Module, algorithm: str, *stages: Stage, make: Any = build_plain_sgd
) -> topkube.DistributedOptimizer:
    return topkube.DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters(),
        aggregation=algorithm,
        density=0.05,
        schedule=stages,
        wire="bf16",
        bucket_bytes=8192,
    )


def case_a_dense_stage_sends_all_that_was_owed(world: World) -> None:
    """The first dense step has a NaN. It is skipped, and the next step sends what was owed."""
    for algorithm in ("hitopk", "powersgd", "int4", "int3"):
        model = build_network()
        optimizer = build_scheduled(model, algorithm, Stage(3, "dense"))
        delivered = DeliveredGradients(world, model)
        for step in range(6):
            is_skipped = step == 3 and world.rank == world.size - 1
            loss = 0.01 * compute_loss(model, *draw_batch(world.rank, step))
            own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            if step != 3:
                delivered.count(own)
            (loss * torch.nan if is_skipped else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            missing = delivered.measure_missing()
            if step in (2, 3):
                assert missing > (1e-5 if algorithm == "int4" else 1e-4), (algorithm, step, "nothing was owed")
            elif step > 3:
                assert missing < 1e-5, (algorithm, step, missing)
        assert (optimizer.steps, optimizer.skipped_steps) == (5, 1)
        owed = optimizer.state_dict()["topkube"]["residuals"]["pieces"]
        assert not any(values.any() for entries in owed.values() for _, values in entries)
        assert are_equal_on_all_ranks(copy_weights(model))
        optimizer.unwrap()


def case_scheduled_runs_resume_bit_for_bit(world: World) -> None:
    """The checkpoints lie before a change, at the change, and after it."""
    schedules: list[tuple[str, tuple[Stage, ...]]] = [
        ("hitopk", (Stage(4, density=0.3), Stage(6, "dense"))),
        ("dense", (Stage(3, "powersgd"), Stage(6, "acpsgd"))),
        ("int8", (Stage(3, "dense"), Stage(6, "int4"))),
        ("onebit", (Stage(3, period=3), Stage(6, period=1))),
    ]
    for algorithm, stages in schedules:
        ends = []
        for parts in ([9], [2, 6, 9]):
            with make_shared_directory(world) as directory:
                for total in parts:
                    model = build_network()
                    optimizer = build_scheduled(model, algorithm, *stages, make=build_adamw)
                    train_with_checkpoints(world, model, optimizer, directory, total, every=100)
                    last = read_bits(optimizer, model)
                    optimizer.unwrap()
                ends.append(last)
        assert ends[0] == ends[1], algorithm


def case_a_scheduled_period_decides_when_nodes_exchange(world: World) -> None:
    model = build_network()
    optimizer = build_scheduled(model, "onebit", Stage(3, period=4), Stage(8, period=2), make=build_sgd)
    exchanged = []
    for step in range(12):
        before = read_agreed_weights(optimizer, model) if step else None
        train(world, model, optimizer, range(step, step + 1))
        after = read_agreed_weights(optimizer, model)
        if before is None or any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            exchanged.append(step + 1)
    assert exchanged == [1, 2, 3, 4, 8, 10, 12]
    optimizer.unwrap()


def case_ranks_with_different_schedules_raise_an_error(world: World) -> None:
    model = build_network()
    optimizer = build_scheduled(model, "hitopk", Stage(3 if world.rank == 0 else 4, "dense"))
    with pytest.raises(TrainingError, match="aggregation settings"):
        train(world, model, optimizer, range(1))
    optimizer._backward.end()
