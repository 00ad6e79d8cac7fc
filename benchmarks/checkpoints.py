"""Measure checkpoints: how long a save stops the training thread, and how long a resume takes.

    python benchmarks/checkpoints.py
    TOPKUBE_RANKS_PER_NODE=1,1 mpiexec -n 2 python benchmarks/checkpoints.py --directory /mnt/shared

The model has `--parameters` float32 values with momentum, and the residuals are those of `hitopk`. A run saves every
`--every` steps while it trains. The stall of a save is the time between the script's steps beyond the median of these
times, summed from the saved step until the checkpoint is published. For comparison: `run.save()`, which waits until the
checkpoint is published, and the minimum: writing and syncing the bytes of rank 0's files once, without a checksum.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import topkube
from topkube.settings import Settings


def time_call(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def write_plain(path: Path, size: int) -> None:
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for _ in range(size >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


class Stall(NamedTuple):
    """The seconds that a save has cost until it was published: `between` the steps, and in the script's part of the
    steps, which are slower (`inside`). Both are beyond the median of the steps without a save."""

    between: float
    inside: float


class StepTimes:
    """The steps of a run: the seconds of the script's part of each step, and the seconds before that part."""

    def __init__(self) -> None:
        self.inside: list[float] = []
        self.between: list[float] = []
        self.published: dict[int, int] = {}
        """The saved step -> the first step after whose end the checkpoint existed."""

    def train(
        self, run: topkube.training.Run, model: torch.nn.Module, optimizer: Any, x: torch.Tensor, steps: int
    ) -> None:
        before = time.perf_counter()
        for batch in run.progress([x] * steps):
            start = time.perf_counter()
            self.between.append(start - before)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert run._checkpoints is not None
            if run._checkpoints.saved[0]:
                self.published.setdefault(run._checkpoints.saved[0], run.step + 1)
            before = time.perf_counter()
            self.inside.append(before - start)

    def compute_stalls(self, every: int) -> list[Stall]:
        """Return the stall of each save."""
        calm = [i for i in range(len(self.inside)) if not self._is_saving(i, every)]
        usual_between = statistics.median(self.between[i] for i in calm)
        usual_inside = statistics.median(self.inside[i] for i in calm)
        stalls = []
        for saved, published in sorted(self.published.items()):
            during = range(saved, min(published + 1, len(self.inside)))
            stalls.append(
                Stall(
                    sum(self.between[i] - usual_between for i in during),
                    sum(self.inside[i] - usual_inside for i in during),
                )
            )
        return stalls

    def _is_saving(self, index: int, every: int) -> bool:
        saved = index // every * every
        return index < 2 or (saved > 0 and index <= self.published.get(saved, index) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a checkpoint.")
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--every", type=int, default=12)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "checkpoints.json")
    args = parser.parse_args()
    world = topkube.init()
    torch.set_num_threads(1)
    name = world.comm.bcast(tempfile.mkdtemp(dir=args.directory) if world.rank == 0 else None)
    width = max(1, args.parameters // 10_000)
    model = torch.nn.Linear(10_000, width, bias=False)
    topkube.broadcast_parameters(model)
    plain = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    optimizer = topkube.DistributedOptimizer(plain, model.named_parameters(), aggregation="hitopk", warmup_steps=0)
    settings = Settings(checkpoint_directory=name, checkpoint_every=args.every, checkpoint_keep=1)
    steps = StepTimes()
    x = torch.randn(args.batch, 10_000)
    with topkube.checkpointing(model, optimizer, settings=settings) as run:
        steps.train(run, model, optimizer, x, args.every * (args.saves + 1) - 1)
        waits = [time_call(run.save) for _ in range(args.repeats)]
    size = sum(path.stat().st_size for path in Path(name).glob("step-*/*"))
    rank_0_bytes = sum(
        (next(Path(name).glob("step-*")) / file).stat().st_size for file in ("shared.pt", "rank-00000.pt")
    )
    resumed_run = topkube.checkpointing(model, optimizer, settings=settings)
    resume_seconds = time_call(resumed_run.__enter__)
    resumed_run.__exit__(None, None, None)
    if world.rank == 0:
        plain_writes = [time_call(lambda: write_plain(Path(name) / "plain", rank_0_bytes)) for _ in range(args.repeats)]
        stalls = steps.compute_stalls(args.every)
        results = {
            "parameters": width * 10_000,
            "ranks": [len(ranks) for ranks in world.node_ranks],
            "processors": len(os.sched_getaffinity(0)),
            "load": round(os.getloadavg()[1], 1),
            "megabytes": round(size / 1e6, 1),
            "step_seconds": round(statistics.median(steps.inside), 3),
            "stall_seconds_first": round(stalls[0].between, 3),
            "stall_seconds": round(statistics.median(stall.between for stall in stalls[1:]), 3),
            "stall_seconds_most": round(max(stall.between for stall in stalls[1:]), 3),
            "slower_steps_seconds": round(statistics.median(stall.inside for stall in stalls[1:]), 3),
            "steps_until_published": statistics.median(
                published - saved for saved, published in steps.published.items()
            ),
            "save_and_wait_seconds": round(statistics.median(waits), 3),
            "load_seconds": round(resume_seconds, 3),
            "plain_write_seconds": round(statistics.median(plain_writes), 3),
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results, indent=1))
        shutil.rmtree(name)


if __name__ == "__main__":
    main()
