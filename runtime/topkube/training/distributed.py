"""DistributedOptimizer: any torch optimizer, fed with gradients that are aggregated over all ranks when `backward()`
returns. What happens during backward is in `backward.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from topkube.errors import ArgumentError, TrainingError
from topkube.settings import Settings
from topkube.telemetry import phases
from topkube.training.aggregation import Aggregation
from topkube.training.backward import Backward
from topkube.training.momentum import MomentumCorrection
from topkube.training.norms import Norms
from topkube.training.parameters import named
from topkube.training.steps import StepReports
from topkube.training.uneven import Turns
from topkube.training.wrapper import OptimizerWrapper
from topkube.world import current


class DistributedOptimizer(OptimizerWrapper):
    """Wraps `optimizer`; use it in its place, with LR schedulers and GradScaler too.

    `named_parameters` names every parameter of `optimizer`, as `model.named_parameters()` does. `aggregation` is
    "auto", "dense" or the name of an algorithm; `density` the share of a large tensor that is sent; `warmup_steps`
    the steps over which the density falls from 1 to that; `wire` "fp32", "bf16" or "fp16"; `selection` "topk" or
    "mstopk"; `momentum_correction` moves the momentum of SGD, Adam or AdamW before the selection (`momentum.py`),
    where the exchange is sparse; `bucket_bytes` the size of a fused bucket. What is None comes from the job's
    spec.aggregation (`Settings`).

    Aggregation comes before the optimizer: momentum and Adam's moments see mean gradients, the same on all ranks, so
    the optimizer's state is the same everywhere. Two shards of float32 (residual and twin) and a staging bucket are
    held besides.

    Raises WorldError before `init()`; ArgumentError for unusable parameters; TrainingError for use that cannot give
    right gradients.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        aggregation: str | None = None,
        density: float | None = None,
        warmup_steps: int | None = None,
        wire: str | None = None,
        selection: str | None = None,
        momentum_correction: bool | None = None,
        bucket_bytes: int | None = None,
        settings: Settings | None = None,
    ) -> None:
        world = current()
        if isinstance(optimizer, DistributedOptimizer):
            raise ArgumentError("the optimizer is distributed already", next_step="wrap the plain torch optimizer once")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ArgumentError(
                "LBFGS evaluates the loss again inside step(), and its line search would take each rank another way",
                next_step="use SGD, AdamW or another optimizer that needs gradients only",
            )
        super().__init__(optimizer)
        self.aggregation = Aggregation.of(
            settings or Settings.from_environment(),
            algorithm=aggregation,
            density=density,
            warmup_steps=warmup_steps,
            wire=wire,
            selection=selection,
            momentum_correction=momentum_correction,
            bucket_bytes=bucket_bytes,
        )
        self._correction = MomentumCorrection(optimizer) if self.aggregation.momentum_correction else None
        momentum = self._correction.momentum if self._correction else lambda: (0.0, 1.0)
        self._backward = Backward(world, named(optimizer, named_parameters), self.aggregation, momentum)
        self._reports = StepReports(world)

    # ---- what the script calls

    @property
    def density(self) -> float:
        """The density in force: falling during warm-up; 1 where aggregation is dense."""
        return self._backward.density

    @property
    def density_used(self) -> float:
        """Density of the last exchange."""
        return self._backward.density_used

    @property
    def steps(self) -> int:
        """Updates made; skipped steps do not count, nor do they advance the warm-up."""
        return self._backward.steps

    @property
    def skipped_steps(self) -> int:
        """Steps that all ranks skipped because a gradient was NaN or infinite somewhere."""
        return self._backward.skipped_steps

    @property
    def turns(self) -> Turns:
        """The batches of all ranks, in step."""
        return self._backward.turns

    @property
    def norms(self) -> Norms | None:
        """Norms of gradient and residual, taken now and then; None, the default, takes none."""
        return self._backward.norms

    @norms.setter
    def norms(self, norms: Norms | None) -> None:
        self._backward.norms = norms

    @property
    def residual_copy(self) -> tuple[int, int]:
        """Which copy of the residuals this rank holds a part of, and how many copies the world has."""
        residuals = self._backward.exchange.residuals
        return residuals.copy, residuals.copies

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """backward() inside only accumulates; the next backward() outside exchanges the sum. Unlike in DDP, what
        counts is where backward() runs, not where forward does."""
        backward = self._backward
        before, backward.synchronize = backward.synchronize, False
        try:
            yield
        finally:
            backward.synchronize = before

    @property
    def accumulating(self) -> bool:
        """Whether gradients of `no_sync()` wait for an exchange."""
        return self._backward.unsynchronized

    def batch(self, samples: int) -> int:
        """Announces this rank's next batch: the next gradients count by `samples`. Returns the samples of all ranks.

        All ranks call it once per batch. A rank that has run out calls it with 0 and goes on with any batch (its
        gradients count for nothing) until 0 comes back.
        """
        return int(self.turns.announce(samples).result()[0])

    def join(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of `loader`, announced. A rank that has run out gets its last batch again, with weight zero,
        until all ranks are done: the steps are those of one process with the union of the batches."""
        return self.turns.batches(loader)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step; nothing where all ranks agreed that a gradient is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._backward.unsynchronized:
            raise TrainingError(
                "step() follows a backward() under no_sync(): every rank would take a step of its own",
                next_step="run the last backward() before step() outside no_sync()",
            )
        if self._backward.takes_step():
            with phases.current.timed("update"):
                if self._correction is not None:
                    self._correction.step(self._backward.sparse_parameters())
                else:
                    self.inner.step()
            self._backward.steps += 1
        self._reports.step(self.steps, self.skipped_steps, self.density_used)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._backward.settle()
        self.inner.zero_grad(set_to_none)
        self._backward.forget_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise TrainingError(
            "a parameter group cannot be added to a distributed optimizer: its parameters have no names",
            next_step="add it to the torch optimizer, then wrap that with all named parameters",
        )

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under "topkube" what this rank adds: its residuals by parameter name,
        the order of the buckets, steps (the warm-up's position) and skipped steps. Every rank must save its own."""
        residuals = self._backward.exchange.residuals
        own = {
            "order": self._backward.layout.order,
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "residuals": {"copy": residuals.copy, "copies": residuals.copies, "pieces": residuals.save()},
        }
        return {**self.inner.state_dict(), "topkube": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave, or a plain optimizer's state (residuals are then zero). For a changed number
        of ranks see `topkube.checkpointing`."""
        state = dict(state_dict)
        own = state.pop("topkube", {})
        self.inner.load_state_dict(state)
        backward = self._backward
        backward.steps, backward.skipped_steps = own.get("steps", 0), own.get("skipped_steps", 0)
        backward.exchange.residuals.load(own.get("residuals", {}).get("pieces", {}))
        backward.layout.restore(own.get("order"))

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.inner!r}, {self.aggregation})"
