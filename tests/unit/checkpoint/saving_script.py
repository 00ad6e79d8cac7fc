"""For each n from 1 on: train, get killed with SIGKILL before the n-th change of the checkpoint directory, and continue
the training to its end. Stop at the first n at which no run is killed. Print one JSON line per n:
`saving_script.py DIRECTORY`.

Every run is a fork of this process, so that each starts at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topkube
from topkube.settings import Settings

STEPS, EVERY = 3, 1
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def train(directory: Path, report: Callable[[dict[str, Any]], None]) -> None:
    """Train with residuals, dropout, momentum and a position in the data; keep one checkpoint. Report each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.Dropout(0.2), nn.Tanh(), nn.Linear(64, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = topkube.DistributedOptimizer(
        plain, model.named_parameters(), aggregation="hitopk", density=0.05, warmup_steps=0
    )
    data = TensorDataset(torch.randn(12, 40, generator=torch.Generator().manual_seed(1)))
    sampler = topkube.data.DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    settings = Settings(checkpoint_directory=str(directory), checkpoint_every=EVERY, checkpoint_keep=1)
    with topkube.checkpointing(model, optimizer, sampler, settings=settings) as run:
        report({"resumed": run.step})
        for (x,) in run.progress(loader, total=STEPS):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report({"done": run.step + 1})
    state = [*model.parameters(), *(value for _, value in list_pieces(optimizer)), sampler.position, sampler.epoch]
    report({"digest": hashlib.sha256(b"".join(map(view_bytes, state))).hexdigest()})


def list_pieces(optimizer: topkube.DistributedOptimizer) -> list[tuple[int, torch.Tensor]]:
    residuals = optimizer.state_dict()["topkube"]["residuals"]["pieces"]
    return [piece for name in sorted(residuals) for piece in residuals[name]]


def view_bytes(value: torch.Tensor | int) -> bytes:
    return value.detach().numpy().tobytes() if isinstance(value, torch.Tensor) else str(value).encode()


def run_forked(directory: Path, killed_before: int = 0) -> tuple[bool, dict[str, Any]]:
    """Return True if the run was killed, and its last report of each kind."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        changes_left = killed_before

        def kill_at_change(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal changes_left
            changes = event in _CHANGES or (event == "open" and isinstance(arguments[0], str | Path))
            if changes and str(arguments[0]).startswith(str(directory)):
                changes_left -= 1
                if changes_left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        if killed_before:
            sys.addaudithook(kill_at_change)
        train(directory, lambda reported: (os.write(writing, json.dumps(reported).encode() + b"\n"), None)[1])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        reported: dict[str, Any] = {}
        for line in file:
            reported |= json.loads(line)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0, reported


def warm_up() -> None:
    """Load everything that loads on first use. If each run loaded it, imports would take nine tenths of the time."""
    assert topkube.training.Run
    assert topkube.data.DistributedSampler
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def main(folder: Path) -> None:
    topkube.init()
    torch.set_num_threads(1)
    warm_up()
    _, whole = run_forked(folder / "whole")
    number, killed = 0, True
    while killed:
        number += 1
        killed, before = run_forked(folder / str(number), number)
        _, after = run_forked(folder / str(number))
        entry = {
            "number": number,
            "killed": killed,
            "done": before.get("done", 0),
            "resumed": after["resumed"],
            "equal": after["digest"] == whole["digest"],
            "checkpoints": sorted(path.name for path in (folder / str(number)).glob("*step-*")),
        }
        print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
