"""Every algorithm of the catalogue trains: the loss falls, all ranks agree, a NaN changes nothing, runs repeat and
resume bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import topkube
from ranks.training.checkpoints import shared_directory
from ranks.training.onebit import adamw, batch, sgd
from ranks.training.scene import loss_of, network, same_on_all_ranks, weights
from topkube.algorithms import OWN, PERIOD
from topkube.settings import Settings
from topkube.world import World


def distributed(model: nn.Module, algorithm: Any, make: Any = sgd) -> topkube.DistributedOptimizer:
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


def train(world: World, model: nn.Module, optimizer: topkube.DistributedOptimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, *batch(world, world.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def held_out(model: nn.Module) -> float:
    x = torch.randn(256, 24, generator=torch.Generator().manual_seed(77))
    with torch.no_grad():
        return float(loss_of(model, x, x[:, :1] * 2 - x[:, 1:2]))


def agreed(optimizer: topkube.DistributedOptimizer, model: nn.Module) -> list[torch.Tensor]:
    with optimizer.consensus():
        return weights(model)


def case_every_algorithm_trains(world: World) -> None:
    for algorithm in OWN:
        model = network()
        before = held_out(model)
        optimizer = distributed(model, algorithm)
        train(world, model, optimizer, range(40))
        with optimizer.consensus():
            after = held_out(model)
            assert same_on_all_ranks(weights(model)), algorithm.name
        assert after < before / 3, (algorithm.name, before, after)
        optimizer.unwrap()


def case_a_nan_on_one_rank_changes_nothing(world: World) -> None:
    for algorithm in OWN:
        model = network()
        optimizer = distributed(model, algorithm, adamw)
        train(world, model, optimizer, range(3))
        before = [tensor.numpy().tobytes() for tensor in [*weights(model), *agreed(optimizer, model)]]
        loss = loss_of(model, *batch(world, world.rank, 3))
        (loss * torch.nan if world.rank == world.size - 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (optimizer.steps, optimizer.skipped_steps) == (3, 1), algorithm.name
        after = [tensor.numpy().tobytes() for tensor in [*weights(model), *agreed(optimizer, model)]]
        assert after == before, algorithm.name
        optimizer.unwrap()


def case_runs_repeat_and_resume_bit_for_bit(world: World) -> None:
    """The checkpoint of step 5 lies between two exchanges of the algorithms that exchange every two steps."""
    for algorithm in OWN:
        ends = []
        for parts in ([12], [5, 12]):
            with shared_directory(world) as directory:
                for total in parts:
                    model = network()
                    optimizer = distributed(model, algorithm, adamw)
                    settings = Settings(checkpoint_directory=directory, checkpoint_every=5)
                    with topkube.checkpointing(model, optimizer, settings=settings) as run:
                        for _ in run.progress([0] * total, total=total, samples=1):
                            loss_of(model, *batch(world, world.rank, run.step)).backward()
                            optimizer.step()
                            optimizer.zero_grad()
                    last = [tensor.numpy().tobytes() for tensor in [*weights(model), *agreed(optimizer, model)]]
                    optimizer.unwrap()
                ends.append(last)
        assert ends[0] == ends[1], algorithm.name
