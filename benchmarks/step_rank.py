"""The program of every rank of benchmarks/step.py: it receives orders, makes training steps, and answers.

step_rank.py LIBRARY SOCKET LAYOUT        LIBRARY: mpich (TopKube) | gloo (DistributedDataParallel)
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from allreduce import orders
from resnet import CLASSES, ResNet50
from topkube.bench.ddp import build_hook, wrap_in_ddp
from topkube.bench.trainings import Step, Training, build_step, build_training
from topkube.examples.char_gpt import GPT, VOCABULARY

BATCH, CONTEXT = 4, 128
LAYERS, WIDTH = 6, 256
IMAGES, SIDE = 4, 64
"""Images of a batch, and pixels per side."""
TIMED_LAYERS, TIMED_WIDTH, FORWARD_SECONDS = 12, 724, 0.005
"""The model whose layers sleep: how many layers it has, their width, and the seconds of forward in each layer."""
POWERSGD_START = 2
"""The first step that PowerSGD compresses. The smallest number that it allows."""


class Sleep(torch.autograd.Function):
    """Take a fixed time in forward, and twice as long in backward, without using the processor."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * FORWARD_SECONDS)
        return gradients[0]


class TimedModel(torch.nn.Module):
    """Layers of 2 MB whose computing time is a sleep, as if another device computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(TIMED_WIDTH, TIMED_WIDTH) for _ in range(TIMED_LAYERS))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Sleep.apply(torch.tanh(layer(x)))
        return ((x - targets) ** 2).mean()


class Classifier(torch.nn.Module):
    """ResNet-50 and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = ResNet50()

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.network(images), targets)


def build_model_and_data(rank: int, name: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Return a GPT of 4.8 million parameters, ResNet-50, or a TimedModel of 6.3 million parameters, the same on all
    ranks, and this rank's batch."""
    torch.manual_seed(0)
    if name == "timed":
        return TimedModel(), torch.ones(1, TIMED_WIDTH), torch.zeros(1, TIMED_WIDTH)
    generator = torch.Generator().manual_seed(rank)
    if name == "resnet50":
        images = torch.randn(IMAGES, 3, SIDE, SIDE, generator=generator)
        return Classifier(), images, torch.randint(CLASSES, (IMAGES,), generator=generator)
    model = GPT(layers=LAYERS, width=WIDTH, context=CONTEXT)
    codes = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
    return model, codes[:, :-1].contiguous(), codes[:, 1:].contiguous()


class TopKubeTrainer:
    """Training with DistributedOptimizer."""

    def __init__(self) -> None:
        import topkube

        topkube.init()
        self.topkube, self.rank = topkube, topkube.rank()
        self.barrier: Callable[[], None] = topkube.barrier

    def enter_link(self) -> None:
        """Forget what was measured on another link."""
        self.topkube.world.current().cache.pop("measured machines", None)

    def start_training(self, contender: str, name: str) -> Training:
        """Return a training that has made no step."""
        model, codes, targets = build_model_and_data(self.rank, name)
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        algorithm, *variants = contender.split("_")
        options: dict[str, Any] = {"density": 0.01, "wire": "bf16", "warmup_steps": 0}
        for variant in variants:
            if variant == "delayed":
                options["delay"] = 1
            elif variant.startswith("period"):
                options["period"] = int(variant.removeprefix("period"))
            elif variant.startswith("rank"):
                options["matrix_rank"] = int(variant.removeprefix("rank"))
            elif variant == "own":
                options["node_weights"] = "own"
            elif variant == "dear":
                options["overlap"] = "dear"
            else:
                options["dense_wire"] = variant
        if algorithm == "dear":
            algorithm, options["overlap"] = "dense", "dear"
        optimizer = self.topkube.DistributedOptimizer(inner, model.named_parameters(), aggregation=algorithm, **options)

        return build_training(optimizer, build_step(model, optimizer, codes, targets))

    def take_phases(self) -> dict[str, float]:
        from topkube.telemetry import phases

        return phases.current.take().seconds


class DdpTrainer:
    """Training with DistributedDataParallel over gloo, or without any exchange ("plain")."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.barrier: Callable[[], None] = dist.barrier

    def start_training(self, contender: str, name: str) -> Training:
        """Return a training that has made no step."""
        model, codes, targets = build_model_and_data(self.rank, name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if contender == "plain":
            return Training(build_step(model, optimizer, codes, targets))
        parallel = wrap_in_ddp(model, contender)
        if contender != "ddp":
            parallel.register_comm_hook(*build_hook(contender, POWERSGD_START))
        return Training(build_step(parallel, optimizer, codes, targets))

    def enter_link(self) -> None:
        """Do nothing: no measurement is kept."""

    def take_phases(self) -> dict[str, float]:
        return {}


def measure_other_threads() -> tuple[float, int]:
    """Return the processor seconds, and the number of times a sleep ended, of all threads but the main thread, which
    computes."""
    seconds, wakeups = 0.0, 0
    for thread in Path("/proc/self/task").iterdir():
        if int(thread.name) == os.getpid():
            continue
        try:
            seconds += int((thread / "schedstat").read_text().split()[0]) / 1e9
            lines = (thread / "status").read_text().splitlines()
        except OSError:  # the thread ended
            continue
        wakeups += next(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
    return seconds, wakeups


class Trainings:
    """The trainings of this rank, one for each contender. They pause while another makes steps."""

    def __init__(self, backend: TopKubeTrainer | DdpTrainer) -> None:
        self._backend = backend
        self._paused: dict[str, Training] = {}

    def end_all(self) -> None:
        """End all trainings."""
        while self._paused:
            self._paused.popitem()[1].end()
        gc.collect()

    def run_order(self, order: dict[str, Any]) -> dict[str, Any]:
        """Make `order["steps"]` steps with `order["contender"]`, after `order["entry"]` steps that are not measured. A
        training that is new makes `order["warm"]` steps before, and those in which a choice becomes final. The order
        "link" means that the speed of the links has changed: all trainings end."""
        if order["do"] == "link":
            self.end_all()
            self._backend.enter_link()
            return {}
        contender = order["contender"]
        is_new = contender not in self._paused
        training = self._paused[contender] = self._paused.get(contender) or self._backend.start_training(
            contender, order.get("model", "gpt")
        )
        training.resume()
        made = 0
        while is_new and (made < order["warm"] or not training.is_final()):
            training.step()
            made += 1
        for _ in range(order.get("entry", 0)):
            training.step()
            made += 1
        answer = measure_steps(self._backend, training.step, order["steps"])
        training.pause()
        return {**answer, "made": made + order["steps"]}


def measure_steps(backend: TopKubeTrainer | DdpTrainer, step: Step, steps: int) -> dict[str, Any]:
    """Make `steps` steps; return when each began and ended, and what a step took."""
    gc.collect()
    gc.disable()
    backend.take_phases()
    backend.barrier()
    processor, wakeups = measure_other_threads()
    own_start = time.thread_time()
    times = [time.clock_gettime(time.CLOCK_MONOTONIC)]
    for _ in range(steps):
        step()
        times.append(time.clock_gettime(time.CLOCK_MONOTONIC))
    own_seconds = time.thread_time() - own_start
    after_processor, after_wakeups = measure_other_threads()
    gc.enable()
    backend.barrier()
    return {
        "times": times,
        "main_cpu": own_seconds / steps,
        "other_cpu": (after_processor - processor) / steps,
        "wakeups": (after_wakeups - wakeups) / steps,
        "phases": {name: seconds / steps for name, seconds in backend.take_phases().items()},
    }


def main(library: str, path: str) -> None:
    torch.set_num_threads(1)
    backend = TopKubeTrainer() if library == "mpich" else DdpTrainer()
    trainings = Trainings(backend)
    orders.follow(path, backend.rank, trainings.run_order)
    trainings.end_all()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
