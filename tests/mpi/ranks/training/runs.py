"""Runs that leave checkpoints in a directory, and runs that go on from them. Started by name, with the directory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topkube
from ranks.training.scene import distributed, loss_of, network, residual_sum, samples, weights
from topkube.settings import Settings
from topkube.world import World


def resumable(directory: str, steps: int, every: int = 4, stop_at: int | None = None) -> tuple[nn.Module, int]:
    """A run with dropout, uneven data and hitopk; saves to `directory`. Returns the model and the steps done here."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(24, 64), nn.Dropout(0.2), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 1))
    torch.manual_seed(topkube.rank())
    optimizer = distributed(model, aggregation="hitopk", density=0.05, warmup_steps=3, wire="bf16")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    dataset = TensorDataset(*samples(10 * topkube.size() - 1))
    sampler = topkube.data.DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    settings = Settings(checkpoint_directory=directory, checkpoint_every=every, checkpoint_keep=2)
    done = 0
    with topkube.checkpointing(model, optimizer, sampler, settings=settings, scheduler=scheduler) as run:
        for x, y in run.progress(loader, total=steps):
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            done += 1
            if run.step + 1 == stop_at and topkube.rank() == topkube.size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
    return model, done


def uninterrupted_and_interrupted_runs_are_equal(world: World, directory: str) -> None:
    whole, done = resumable(f"{directory}/whole", 14)
    assert done == 14
    kept = sorted(path.name for path in Path(directory, "whole").glob("*"))
    assert kept == ["step-00000012", "step-00000014"], kept
    with pytest.raises(SystemExit) as stop:
        resumable(f"{directory}/parts", 14, every=100, stop_at=6)
    assert stop.value.code == 128 + signal.SIGTERM
    [name] = [path.name for path in Path(directory, "parts").glob("*")]
    first = int(name.removeprefix("step-"))
    assert first in (6, 7), (
        name
    )  # the signal comes during step 6; it may be seen with the announcement of the next batch
    parts, done = resumable(f"{directory}/parts", 14)
    assert done == 14 - first
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


def leave_residuals(world: World, directory: str) -> None:
    """Writes a checkpoint, and beside it what all ranks together owe."""
    model = network()
    optimizer = distributed(model, aggregation="hitopk", density=0.02)
    settings = Settings(checkpoint_directory=directory, checkpoint_every=1000)
    x, y = samples(40)
    with topkube.checkpointing(model, optimizer, settings=settings) as run:
        for x_, y_ in run.progress([(x, y)] * 5):
            loss_of(model, x_, y_).backward()
            optimizer.step()
            optimizer.zero_grad()
    owed = residual_sum(optimizer, model)
    if topkube.rank() == 0:
        torch.save(owed, f"{directory}/owed.pt")


def take_up_residuals(world: World, directory: str) -> None:
    """Resumes in another world: the sum must stay, and training go on."""
    model = network()
    optimizer = distributed(model, aggregation="hitopk", density=0.02)
    with topkube.checkpointing(model, optimizer, settings=Settings(checkpoint_directory=directory)) as run:
        assert run.step == 5
        # An exchange of zeros cuts new shards; every rank keeps what it owns, and pays from it.
        before = weights(model)
        for group in optimizer.param_groups:
            group.update(lr=1.0, momentum=0.0, weight_decay=0.0)
        optimizer.inner.state.clear()
        (sum(parameter.sum() for parameter in model.parameters()) * 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        owed, wanted = residual_sum(optimizer, model), torch.load(f"{directory}/owed.pt", weights_only=True)
        assert any(value.abs().sum() > 0 for value in wanted.values())
        for (name, parameter), first in zip(model.named_parameters(), before, strict=True):
            paid = (first - parameter).double().detach()
            torch.testing.assert_close(paid + owed[name], wanted[name], rtol=1e-4, atol=1e-6)
