"""Runs and stores on one rank, for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import topkube
from topkube.settings import Settings
from topkube.training.checkpoint import CheckpointStore

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def build_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def build_training(width: int = 64, make: MakeOptimizer = build_sgd) -> tuple[nn.Module, topkube.DistributedOptimizer]:
    topkube.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 1))
    plain = make(list(model.parameters()))
    return model, topkube.DistributedOptimizer(plain, model.named_parameters(), aggregation="dense")


def train(
    directory: Path,
    steps: int,
    width: int = 64,
    make: MakeOptimizer = build_sgd,
    pair: tuple[nn.Module, topkube.DistributedOptimizer] | None = None,
    objects: dict[str, object] | None = None,
    **settings: object,
) -> topkube.training.Run:
    """Run in `directory`. By default, save every 2 steps and keep 2 checkpoints. The states of `objects` are saved."""
    model, optimizer = pair or build_training(width, make)
    data = list(torch.randn(6, 4, 20, generator=torch.Generator().manual_seed(0)))
    values = {"checkpoint_directory": str(directory), "checkpoint_every": 2, "checkpoint_keep": 2, **settings}
    run_settings = Settings(**values)  # type: ignore[arg-type]
    with topkube.checkpointing(model, optimizer, settings=run_settings, **(objects or {})) as run:
        for x in run.progress(data, total=steps):
            run.loss(model(x).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run


def list_names(directory: Path, pattern: str = "*step-*") -> list[str]:
    return sorted(path.name for path in directory.glob(pattern))


def open_store(directory: Path, attempt: int = 1, job: str = "", keep: int = 2) -> CheckpointStore:
    return CheckpointStore(directory, keep, topkube.world.current(), job, attempt)


def claim_store(directory: Path, **options: int) -> CheckpointStore:
    """Return a store that has claimed `directory`."""
    store = open_store(directory, **options)  # type: ignore[arg-type]
    store.claim()
    return store


def save_value(store: CheckpointStore, step: int, value: float = 0.0) -> None:
    store.save(step, lambda: {"value": torch.tensor(value)}, {"residuals": {}})


def load_value(directory: Path) -> float:
    loaded = open_store(directory).load(0, 1)
    assert loaded is not None
    return float(loaded.shared["value"])
