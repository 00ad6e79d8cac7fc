"""The contenders of `topkube bench train`: the same GPT without any exchange, with DistributedDataParallel, and with
each aggregation of TopKube."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from topkube.algorithms import CHOICES, OVERLAP, find_algorithm
from topkube.bench.ddp import build_hook, wrap_in_ddp
from topkube.bench.trainings import Training, build_step, build_training
from topkube.errors import ArgumentError
from topkube.examples.char_gpt import GPT, VOCABULARY
from topkube.examples.options import set_threads
from topkube.training import DistributedOptimizer, device
from topkube.world import World

NO_EXCHANGE, DDP, DDP_FP16 = "no exchange", "DDP", "DDP, fp16"
CONTEXT = 128
"""Characters of a sequence."""
_HEADS = 4


@dataclass(frozen=True)
class Task:
    """The training of all contenders: a GPT of `layers` blocks and `width` features, with `batch` sequences per rank
    and step. `overlap` is that of TopKube's aggregations. Raises ArgumentError."""

    layers: int
    width: int
    batch: int
    overlap: str

    def __post_init__(self) -> None:
        OVERLAP.check(self.overlap)
        if self.width % _HEADS:
            raise ArgumentError(
                f"width is {self.width}, which {_HEADS} attention heads cannot divide",
                next_step=f"pass a multiple of {_HEADS}, for example {self.width + -self.width % _HEADS}",
            )


def list_aggregations(text: str) -> list[str]:
    """Return the aggregations that the text names, separated by commas. Raises ArgumentError for an unknown name, and
    if there is none."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in CHOICES:
            find_algorithm(name)
    if not names:
        raise ArgumentError("no aggregation is named", next_step="pass names, for example --aggregations dense,auto")
    return names


class Contenders:
    """The contenders by name, each with a function that starts its training. All ranks start the same contenders in the
    same order. `parameters` is the size of their model. Raises DeviceError."""

    def __init__(self, world: World, task: Task, aggregations: list[str], has_ddp: bool) -> None:
        set_threads()
        self._device = device()
        self.is_on_gpu = self._device.type == "cuda"
        self._task, self._rank = task, world.rank
        self.starts: dict[str, Callable[[], Training]] = {NO_EXCHANGE: lambda: self._start_plain("")}
        if has_ddp:
            self.starts |= {DDP: lambda: self._start_plain("ddp"), DDP_FP16: lambda: self._start_plain("fp16")}
        for name in aggregations:
            self.starts[name] = lambda name=name: self._start_aggregation(name)  # type: ignore[misc]
        self.parameters = sum(parameter.numel() for parameter in self._build_model().parameters())

    def _build_model(self) -> GPT:
        torch.manual_seed(0)  # the same weights on all ranks
        return GPT(self._task.layers, self._task.width, _HEADS, CONTEXT).to(self._device)

    def _draw_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's inputs and targets, both (B, T)."""
        generator = torch.Generator().manual_seed(self._rank)
        codes = torch.randint(VOCABULARY, (self._task.batch, CONTEXT + 1), generator=generator).to(self._device)
        return codes[:, :-1].contiguous(), codes[:, 1:].contiguous()

    def _start_plain(self, hook: str) -> Training:
        """Start a training without TopKube: in DistributedDataParallel with the hook of this name, or without any
        exchange."""
        model = self._build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if not hook:
            return Training(build_step(model, optimizer, *self._draw_batch()))
        parallel = wrap_in_ddp(model, hook)
        if hook != "ddp":
            parallel.register_comm_hook(*build_hook(hook, powersgd_start=2))
        return Training(build_step(parallel, optimizer, *self._draw_batch()))

    def _start_aggregation(self, name: str) -> Training:
        model = self._build_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), aggregation=name, overlap=self._task.overlap)
        return build_training(optimizer, build_step(model, optimizer, *self._draw_batch()))
