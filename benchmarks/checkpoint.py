"""What a checkpoint costs: the seconds for which training stands still while it is saved, and those of a resumption.

    TOPKUBE_RANKS_PER_NODE=2,2 mpiexec -n 4 python benchmarks/checkpoint.py --directory /mnt/shared

The model is one of `--parameters` float32 values with momentum; residuals are those of `hitopk`. Beside it the least
that could be done: the bytes of rank 0's file written once and synced, without a checksum.
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

import torch

import topkube
from topkube.settings import Settings


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def plain_write(path: Path, size: int) -> None:
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for _ in range(size >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a checkpoint.")
    parser.add_argument("--parameters", type=int, default=25_557_032)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "checkpoint.json")
    args = parser.parse_args()
    world = topkube.init()
    torch.set_num_threads(1)
    name = world.comm.bcast(tempfile.mkdtemp(dir=args.directory) if world.rank == 0 else None)
    width = max(1, args.parameters // 1000)
    model = torch.nn.Linear(1000, width, bias=False)
    topkube.broadcast_parameters(model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = topkube.DistributedOptimizer(plain, model.named_parameters(), aggregation="hitopk", warmup_steps=0)
    settings = Settings(checkpoint_directory=name, checkpoint_every=10**9, checkpoint_keep=1)
    with topkube.checkpointing(model, optimizer, settings=settings) as run:
        for x in run.progress([torch.ones(1, 1000)]):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        saves = [seconds(run.save) for _ in range(args.repeats)]
    size = sum(path.stat().st_size for path in Path(name).glob("step-*/*"))
    shared = sum(path.stat().st_size for path in Path(name).glob("step-*/shared.pt"))
    again = topkube.checkpointing(model, optimizer, settings=settings)
    load = seconds(again.__enter__)
    again.__exit__(None, None, None)
    if world.rank == 0:
        least = [seconds(lambda: plain_write(Path(name) / "plain", shared)) for _ in range(args.repeats)]
        found = {
            "parameters": width * 1000,
            "ranks": [len(ranks) for ranks in world.node_ranks],
            "megabytes": round(size / 1e6, 1),
            "save_seconds": round(statistics.median(saves), 3),
            "save_seconds_least": round(min(saves), 3),
            "load_seconds": round(load, 3),
            "plain_write_seconds": round(statistics.median(least), 3),
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found, indent=1))
        shutil.rmtree(name)


if __name__ == "__main__":
    main()
