"""The program of every rank of benchmarks/target_loss.py: it receives orders, trains, and answers.

target_loss_rank.py LIBRARY SOCKET LAYOUT        LIBRARY: mpich (TopKube) | gloo (DistributedDataParallel)
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parent))

import tasks
from allreduce import orders
from simulated_nodes import make_optimizer
from topkube.bench.ddp import build_hook, wrap_in_ddp


class Wrapped(NamedTuple):
    """A model and its optimizer, as a library has wrapped them."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    consensus: Callable[[], AbstractContextManager[None]]
    """Inside it, the model has the weights that all nodes agree on."""
    end: Callable[[], object]


class TopKubeWrapper:
    """Training with DistributedOptimizer."""

    def __init__(self) -> None:
        import topkube

        topkube.init()
        self.topkube, self.rank, self.size = topkube, topkube.rank(), topkube.size()
        self.barrier: Callable[[], None] = topkube.barrier

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, exchange: dict[str, Any]) -> Wrapped:
        """Wrap with the arguments of DistributedOptimizer in `exchange`."""
        distributed = self.topkube.DistributedOptimizer(optimizer, model.named_parameters(), **exchange)
        return Wrapped(model, distributed, distributed.consensus, distributed.unwrap)


class DdpWrapper:
    """Training with DistributedDataParallel over gloo."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.barrier: Callable[[], None] = dist.barrier

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, exchange: dict[str, Any]) -> Wrapped:
        """Wrap with the communication hook in `exchange`, or with none."""
        parallel = wrap_in_ddp(model, exchange.get("hook", "ddp"))
        if "hook" in exchange:
            parallel.register_comm_hook(*build_hook(exchange["hook"], exchange.get("start", 0)))
        return Wrapped(parallel, optimizer, nullcontext, lambda: None)


def yield_batches(
    dataset: Dataset[tuple[torch.Tensor, ...]], batch: int, rank: int, size: int, seed: int
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield batches without end: entries rank, rank + size, ... of the epoch's permutation, which is that of
    topkube.data.DistributedSampler. `batch` is the number of samples of all ranks."""
    epoch, count = 0, len(dataset)  # type: ignore[arg-type]
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(count)
        for first in range(0, count - batch + 1, batch):
            samples = [dataset[int(index)] for index in order[first + rank : first + batch : size]]
            yield tuple(torch.stack(column) for column in zip(*samples, strict=True))
        epoch += 1


class TargetTraining:
    """A run that is under way."""

    def __init__(self, backend: TopKubeWrapper | DdpWrapper, order: dict[str, Any]) -> None:
        torch.manual_seed(order["seed"])
        name, steps = order["model"], order["steps"]
        self._backend = backend
        self._model, dataset, self._compute_loss, self._measure_held_out = tasks.build_task(name)
        plain = make_optimizer(order["optimizer"], self._model, tasks.LEARNING_RATE[name, order["optimizer"]])
        self._wrapped = backend.wrap(self._model, plain, order["exchange"])
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(
            self._wrapped.optimizer, lambda step: tasks.compute_rate_factor(step, steps)
        )
        self._batches = yield_batches(dataset, tasks.BATCH[name], backend.rank, backend.size, order["seed"])

    def run(self, steps: int) -> None:
        """Make `steps` steps."""
        for _ in range(steps):
            self._compute_loss(self._wrapped.model, *next(self._batches)).backward()
            self._wrapped.optimizer.step()
            self._wrapped.optimizer.zero_grad()
            self._scheduler.step()

    def time(self, steps: int) -> dict[str, float]:
        """Return when the first of these steps started and when the last ended, by a clock that all ranks share."""
        gc.collect()
        gc.disable()
        self._backend.barrier()
        start = time.clock_gettime(time.CLOCK_MONOTONIC)
        self.run(steps)
        end = time.clock_gettime(time.CLOCK_MONOTONIC)
        gc.enable()
        self._backend.barrier()
        return {"start": start, "end": end}

    def measure_held_out(self) -> float | None:
        """Return the held-out loss of the weights that all nodes agree on; None on all ranks but the first."""
        with self._wrapped.consensus(), torch.no_grad():
            return float(self._measure_held_out(self._model)[0]) if self._backend.rank == 0 else None

    def end(self) -> None:
        self._wrapped.end()


class Follower:
    """The receiver of orders. It has one training at a time."""

    def __init__(self, backend: TopKubeWrapper | DdpWrapper) -> None:
        self._backend = backend
        self._training: TargetTraining | None = None

    def run_order(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "start":
            if self._training is not None:
                self._training.end()
            self._training = TargetTraining(self._backend, order)
            return {}
        assert self._training is not None
        if order["do"] == "time":
            return dict(self._training.time(order["steps"]))
        self._training.run(order["steps"])
        return {"loss": self._training.measure_held_out() if order.get("held_out", True) else None}


def main(library: str, path: str) -> None:
    torch.set_num_threads(1)
    backend = TopKubeWrapper() if library == "mpich" else DdpWrapper()
    orders.follow(path, backend.rank, Follower(backend).run_order)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
