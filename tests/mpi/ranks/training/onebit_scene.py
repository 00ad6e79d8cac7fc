"""The parts that the cases of onebit and of similar algorithms share: optimizers, batches, and sums over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

import topkube
from ranks.training.scene import compute_loss, copy_weights
from topkube.collectives import two_stage
from topkube.settings import Settings
from topkube.training.optimizers.lamb import LAMB
from topkube.training.optimizers.lars import LARS
from topkube.training.optimizers.mixed_precision import MasterWeights
from topkube.world import World

RATE = 0.02


def build_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.02)


def build_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=0.01)


def build_lars(parameters: Any) -> torch.optim.Optimizer:
    return LARS(parameters, lr=0.02, trust=1.0, weight_decay=0.01)


def build_lamb(parameters: Any) -> torch.optim.Optimizer:
    return LAMB(parameters, lr=0.01, weight_decay=0.02)


def build_masters(make: Any) -> Any:
    """Return a function that builds the optimizer of `make` with master weights."""
    return lambda parameters: MasterWeights(make(parameters))


def read_trained_weights(optimizer: topkube.DistributedOptimizer, model: nn.Module) -> list[torch.Tensor]:
    """Return copies of the weights that the optimizer updates: the model's, or their masters."""
    if isinstance(optimizer.inner, MasterWeights):
        return [tensor.detach().clone() for tensor in optimizer.master_parameters()]
    return copy_weights(model)


def build_onebit(model: nn.Module, make: Any = build_sgd, **options: Any) -> topkube.DistributedOptimizer:
    return topkube.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), **{"aggregation": "onebit", "bucket_bytes": 8192, **options}
    )


def draw_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :1] * 2 - x[:, 1:2]


def draw_batch_of(model: nn.Module, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch in the dtype of the model's weights."""
    x, y = draw_batch(rank, step)
    return x.to(next(model.parameters()).dtype), y


def read_bits(optimizer: topkube.DistributedOptimizer, model: nn.Module) -> list[bytes]:
    """Return the bits of the node's own weights, and of the weights on which all nodes agree."""
    tensors = [*read_trained_weights(optimizer, model), *read_agreed_weights(optimizer, model)]
    return [tensor.numpy().tobytes() for tensor in tensors]


def train(world: World, model: nn.Module, optimizer: topkube.DistributedOptimizer, steps: range) -> None:
    for step in steps:
        compute_loss(model, *draw_batch_of(model, world.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_checkpoints(
    world: World, model: nn.Module, optimizer: topkube.DistributedOptimizer, directory: str, steps: int, every: int = 4
) -> None:
    """Train up to `steps` with a checkpoint every `every` steps. Continue from the newest checkpoint in `directory`."""
    settings = Settings(checkpoint_directory=directory, checkpoint_every=every, checkpoint_keep=9)
    with topkube.checkpointing(model, optimizer, settings=settings) as run:
        for _ in run.progress([0] * steps, total=steps, samples=1):
            compute_loss(model, *draw_batch_of(model, world.rank, run.step)).backward()
            optimizer.step()
            optimizer.zero_grad()


def read_agreed_weights(optimizer: topkube.DistributedOptimizer, model: nn.Module) -> list[torch.Tensor]:
    with optimizer.consensus():
        return read_trained_weights(optimizer, model)


def read_residuals(optimizer: topkube.DistributedOptimizer) -> Any:
    """Return what this rank's node has not sent. With masters, a state is saved inside `consensus`."""
    with optimizer.consensus():
        return optimizer.state_dict()["topkube"]["residuals"]


def sum_unsent_changes(world: World, optimizer: topkube.DistributedOptimizer, model: nn.Module) -> list[np.ndarray]:
    """Return the unsent changes of all nodes, as a mean weighted by ranks, plus the unsent means of the owners."""
    saved = read_residuals(optimizer)
    own = sum_over_ranks(world, saved["pieces"], model, saved["weight"])
    arriving = {name: saved["pieces"].get(f"{name} delayed", []) for name, _ in model.named_parameters()}
    delayed = sum_over_ranks(world, arriving, model, saved["weight"])
    owners = sum_owed_by_owners(world, optimizer, model)
    return [a + b + c for a, b, c in zip(own, delayed, owners, strict=True)]


@contextmanager
def owners_keeping_a_part(most_times: float = 3.0) -> Iterator[None]:
    """Let owners of segments keep a part of what they do not send beside their weights, as with many nodes."""
    before, two_stage.MOST_TIMES = two_stage.MOST_TIMES, most_times
    try:
        yield
    finally:
        two_stage.MOST_TIMES = before


def sum_owed_by_owners(world: World, optimizer: topkube.DistributedOptimizer, model: nn.Module) -> list[np.ndarray]:
    return sum_over_ranks(world, read_residuals(optimizer)["owners"], model, 1.0)


def sum_over_ranks(world: World, pieces: Any, model: nn.Module, weight: float) -> list[np.ndarray]:
    """Return the sum of the pieces of all ranks, times each rank's weight."""
    totals = []
    for name, parameter in model.named_parameters():
        full = np.zeros(parameter.numel())
        for start, values in pieces.get(name, []):
            full[start : start + len(values)] += values.double().numpy() * weight
        totals.append(world.comm.allreduce(full).reshape(parameter.shape))
    return totals
