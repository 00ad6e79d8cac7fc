"""Runs that write checkpoints to a directory, and runs that continue from them. They are started by name, with the
directory."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topkube
from ranks.training.scene import build_network, build_optimizer, compute_loss, copy_weights, draw_samples, sum_residuals
from topkube.settings import Settings
from topkube.world import World

Meanwhile = Callable[[str, int], None]
"""Called at moments of a run ("start", "loading", "step") with the number of the step that comes next, from 1."""


class ReportingDataset(TensorDataset):
    """A dataset that reports each load of a sample."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.loading: Callable[[], None] = lambda: None

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.loading()
        return super().__getitem__(index)


def run_with_checkpoints(
    directory: str, steps: int, every: int = 4, meanwhile: Meanwhile | None = None
) -> tuple[nn.Module, int]:
    """Train with dropout, uneven data and hitopk, and save to `directory`. Return the model and the number of steps
    that this call has made."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(24, 64), nn.Dropout(0.2), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 1))
    torch.manual_seed(topkube.rank())
    optimizer = build_optimizer(model, aggregation="hitopk", density=0.05, warmup_steps=3, wire="bf16")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    dataset = ReportingDataset(*draw_samples(10 * topkube.size() - 1))
    sampler = topkube.data.DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    settings = Settings(checkpoint_directory=directory, checkpoint_every=every, checkpoint_keep=2)
    done, report = 0, meanwhile or (lambda moment, step: None)
    with topkube.checkpointing(model, optimizer, sampler, settings=settings, scheduler=scheduler) as run:
        dataset.loading = lambda: report("loading", run.step + 1)
        report("start", 1)
        for x, y in run.progress(loader, total=steps):
            report("step", run.step + 1)
            compute_loss(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            done += 1
    return model, done


def have_equal_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def find_newest_step(directory: str) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name[5:13]) for path in Path(directory).glob("step-*")), default=0)


def stop_and_resume_runs(world: World, directory: str) -> None:
    """Send SIGTERM to one rank, as when one pod is drained: all ranks save after the same step, and end with 143."""
    whole, done = run_with_checkpoints(f"{directory}/whole", 14)
    assert done == 14
    kept = sorted(path.name for path in Path(directory, "whole").glob("step-*"))
    assert kept == ["step-00000012.run-00001", "step-00000014.run-00001"], kept
    processes = world.comm.allgather(os.getpid())

    def build_stop(on: int, when: str, number: int, sender: int | None = None) -> Meanwhile:
        def stop_at(moment: str, step: int) -> None:
            if world.rank == (on if sender is None else sender) and (moment, step) == (when, number):
                if sender is not None:
                    time.sleep(0.3)  # so that the other rank is likely to wait in its exchange
                os.kill(processes[on], signal.SIGTERM)

        return stop_at

    stops = {
        "in a step": (6, build_stop(on=world.size - 1, when="step", number=6)),
        "inside a collective": (6, build_stop(on=0, when="step", number=6, sender=world.size - 1)),
        "while data is loaded": (5, build_stop(on=1, when="loading", number=5)),
        "before the first step": (1, build_stop(on=1, when="start", number=1)),
    }
    for name, (step, meanwhile) in stops.items():
        place = f"{directory}/{name}"
        with pytest.raises(SystemExit) as ended:
            run_with_checkpoints(place, 14, every=100, meanwhile=meanwhile)
        assert ended.value.code == 128 + signal.SIGTERM
        first = find_newest_step(place)
        assert step <= first <= step + 1, (name, first)  # the signal may be seen with the next batch
        parts, done = run_with_checkpoints(place, 14)
        assert done == 14 - first, name
        assert have_equal_weights(whole, parts), name


KILLS = {
    "a rank's file": (1, "open", "rank-00001.pt"),
    "the manifest": (0, "open", "checkpoint.json"),
    "the rename": (0, "os.rename", ".step-00000008.run-00001.tmp"),
}
"""Moment -> rank, audit event, and the name of the file: what the rank is about to do."""


def end_by_sigkill(world: World, directory: str, moment: str) -> None:
    """Start a run in which a rank gets SIGKILL while the checkpoint of step 8 is saved."""
    rank, expected, name = KILLS[moment]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        path = str(arguments[0]) if event == expected else ""
        if os.path.basename(path) == name and "step-00000008" in path:  # the save of step 4 may still be under way
            os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == rank:
        sys.addaudithook(hook)
    run_with_checkpoints(f"{directory}/{moment}", 10)


def resume_killed_runs(world: World, directory: str) -> None:
    whole, _ = run_with_checkpoints(f"{directory}/whole", 10)
    for moment in KILLS:
        assert find_newest_step(f"{directory}/{moment}") == 4, moment
        parts, done = run_with_checkpoints(f"{directory}/{moment}", 10)
        assert done == 6
        assert have_equal_weights(whole, parts), moment


def leave_residuals(world: World, directory: str) -> None:
    """Write a checkpoint, and beside it the sum of the residuals of all ranks."""
    model = build_network()
    optimizer = build_optimizer(model, aggregation="hitopk", density=0.02)
    settings = Settings(checkpoint_directory=directory, checkpoint_every=1000)
    x, y = draw_samples(40)
    with topkube.checkpointing(model, optimizer, settings=settings) as run:
        for inputs, targets in run.progress([(x, y)] * 5):
            compute_loss(model, inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    owed = sum_residuals(optimizer, model)
    if topkube.rank() == 0:
        torch.save(owed, f"{directory}/owed.pt")


def take_up_residuals(world: World, directory: str) -> None:
    """Resume in another world: the sum of the residuals must stay, and training must continue."""
    model = build_network()
    optimizer = build_optimizer(model, aggregation="hitopk", density=0.02)
    with topkube.checkpointing(model, optimizer, settings=Settings(checkpoint_directory=directory)) as run:
        assert run.step == 5
        # An exchange of zeros makes new shards. Every rank keeps the residual of its shard, and sends from it.
        before = copy_weights(model)
        for group in optimizer.param_groups:
            group.update(lr=1.0, momentum=0.0, weight_decay=0.0)
        optimizer.inner.state.clear()
        (sum(parameter.sum() for parameter in model.parameters()) * 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        owed, expected = sum_residuals(optimizer, model), torch.load(f"{directory}/owed.pt", weights_only=True)
        assert any(value.abs().sum() > 0 for value in expected.values())
        for (name, parameter), first in zip(model.named_parameters(), before, strict=True):
            paid = (first - parameter).double().detach()
            torch.testing.assert_close(paid + owed[name], expected[name], rtol=1e-4, atol=1e-6)
