"""DistributedOptimizer: any torch optimizer, fed with gradients that are aggregated over all ranks when `backward()`
returns.

Hooks see each gradient as backward produces it. A bucket whose gradients are all there goes to the communication
thread, which exchanges it while backward goes on. At the end of backward the rest follows, and all ranks agree
whether the step is finite.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from topkube.errors import ArgumentError, TrainingError
from topkube.settings import Settings
from topkube.telemetry import phases
from topkube.training.aggregation import Aggregation
from topkube.training.buckets import Bucket, Parameter, plan
from topkube.training.exchange import Exchange
from topkube.training.schedule import schedule
from topkube.training.uneven import Turns
from topkube.world import current

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps `optimizer`; use it in its place, with LR schedulers and GradScaler too.

    `named_parameters` names every parameter of `optimizer`, as `model.named_parameters()` does. `aggregation` is
    "auto", "dense" or the name of an algorithm; `density` the share of a large tensor that is sent; `warmup_steps`
    the steps over which the density falls from 1 to that; `wire` "fp32", "bf16" or "fp16"; `selection` "topk" or
    "mstopk"; `bucket_bytes` the size of a fused bucket. What is None comes from the job's spec.aggregation
    (`Settings`).

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
        bucket_bytes: int | None = None,
        settings: Settings | None = None,
    ) -> None:
        # torch.optim.Optimizer.__init__ is left out: parameters, state and hooks are the wrapped optimizer's, not
        # copies.
        self._world = current()
        if isinstance(optimizer, DistributedOptimizer):
            raise ArgumentError("the optimizer is distributed already", next_step="wrap the plain torch optimizer once")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ArgumentError(
                "LBFGS evaluates the loss again inside step(), and its line search would take each rank another way",
                next_step="use SGD, AdamW or another optimizer that needs gradients only",
            )
        self.inner = optimizer
        self.aggregation = Aggregation.of(
            settings or Settings.from_environment(),
            algorithm=aggregation,
            density=density,
            warmup_steps=warmup_steps,
            wire=wire,
            selection=selection,
            bucket_bytes=bucket_bytes,
        )
        self.steps = 0
        """Updates made; skipped steps do not count, nor do they advance the warm-up."""
        self.skipped_steps = 0
        """Steps that all ranks skipped because a gradient was NaN or infinite somewhere."""
        self.density_used = 1.0
        """Density of the last exchange."""
        self.turns = Turns(self._world)
        self._exchange = Exchange(self._world, self.aggregation)
        self._parameters = _checked(optimizer, named_parameters)
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._order: list[str] | None = None
        self._seen: list[int] = []
        self._task: int | None = None
        self._futures: list[Future[bool]] = []
        self._synchronize = True
        self._unsynchronized = self._nonfinite = self._last_nonfinite = False
        self._first_gradient = 0.0
        weakref.finalize(self, _remove, [handle for p in self._parameters for handle in self._hook(p)])

    # ---- hooks

    def _hook(self, parameter: Parameter) -> list[Any]:
        """Two hooks on a parameter, before and after a gradient is accumulated. They hold the optimizer weakly:
        dropping it ends them."""
        me, tensor = weakref.ref(self), parameter.tensor

        def before(gradient: torch.Tensor) -> torch.Tensor | None:
            optimizer = me()
            return optimizer._before(parameter, gradient) if optimizer is not None else None

        def after(_: torch.Tensor) -> None:
            optimizer = me()
            if optimizer is not None:
                optimizer._after(parameter)

        frozen = not tensor.requires_grad
        tensor.requires_grad_(True)  # torch refuses hooks on a frozen parameter, which may be unfrozen later
        handles = [
            tensor.register_hook(before),  # type: ignore[no-untyped-call]
            tensor.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
        ]
        tensor.requires_grad_(not frozen)
        return handles

    def _before(self, parameter: Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        if gradient.layout is not torch.strided:
            raise TrainingError(
                f"the gradient of {parameter.name} has layout {gradient.layout}",
                cause="an embedding with sparse=True",
                next_step="use sparse=False: its gradient is made sparse by the exchange",
            )
        self._begin()
        if parameter.tensor.grad is None:
            parameter.aggregated, parameter.stash = False, None
        elif parameter.aggregated:
            parameter.stash, parameter.aggregated, parameter.tensor.grad = parameter.tensor.grad, False, None
        scale = self.turns.scale()
        if scale == 0:
            parameter.weightless = parameter.tensor.grad is None and parameter.stash is None
            return torch.zeros_like(gradient)  # 0 * NaN would be NaN
        parameter.weightless = False
        return gradient * scale if scale != 1 else None

    def _after(self, parameter: Parameter) -> None:
        if not self._synchronize:
            self._unsynchronized = True
            return
        bucket = self._bucket_of.get(parameter.index)
        if self._order is None:
            self._seen.append(parameter.index)
        elif bucket is not None:
            bucket.waiting -= 1
            while len(self._futures) < len(self._buckets) and self._buckets[len(self._futures)].waiting <= 0:
                self._hand_over()

    def _begin(self) -> None:
        """Once per backward, at its first gradient."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        if self._task is not None:
            self._abandon()
        self._task, self._first_gradient = task, time.perf_counter()
        self.turns.forward_ended(self._first_gradient)
        if all(parameter.tensor.grad is None for parameter in self._parameters):
            self._nonfinite = self._last_nonfinite = self._unsynchronized = False
        self._seen.clear()
        for bucket in self._buckets:
            bucket.waiting = sum(parameter.tensor.requires_grad for parameter in bucket.parameters)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _abandon(self) -> None:
        """The backward before did not end: what it handed over the other ranks have seen, so they wait for the rest
        of it."""
        handed_over, self._futures = self._futures, []
        for future in handed_over:
            future.result()
        self._exchange.residuals.discard()
        if handed_over and self._world.size > 1:
            raise TrainingError(
                f"backward() began after another broke off, {len(handed_over)} of {len(self._buckets)} buckets in",
                cause="an exception in backward(), or torch.utils.checkpoint with use_reentrant=True",
                next_step="end the process on an exception, and use use_reentrant=False: the ranks are out of step",
            )

    def _hand_over(self) -> None:
        bucket, density = self._buckets[len(self._futures)], self.density
        if not any(parameter.tensor.requires_grad for parameter in bucket.parameters):
            done: Future[bool] = Future()
            done.set_result(True)
            self._futures.append(done)
            return
        warming = self.steps < self.aggregation.warmup_steps
        if self._world.size == 1 and not self._exchange.large.sparse:  # nothing to send: no thread needs to know
            done = Future()
            done.set_result(self._exchange.run(bucket, density, warming))
            self._futures.append(done)
            return
        self._futures.append(schedule().submit(lambda: self._exchange.run(bucket, density, warming)))

    def _finish(self) -> None:
        """End of backward, in the thread that called it: the remaining buckets, then the verdict on the step."""
        self._task = None
        if self._synchronize:
            self._lay_out()
            self.density_used = self.density
            while len(self._futures) < len(self._buckets):
                self._hand_over()
            futures, self._futures = self._futures, []
            finite = [future.result() for future in futures]
            self._conclude(all(finite))
        phases.current.add("backward", time.perf_counter() - self._first_gradient)

    def _conclude(self, finite: bool) -> None:
        trainable = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        idle = [parameter.weightless or parameter.created for parameter in trainable]
        nonfinite, unused = self._agree([not finite, sum(idle)])
        self._unsynchronized = False
        self._last_nonfinite = nonfinite > 0
        if self._last_nonfinite:
            self._exchange.residuals.discard()
            self.skipped_steps += not self._nonfinite
            self._nonfinite = True
            for parameter in trainable:  # the same on every rank, so that clipping and GradScaler decide alike
                if parameter.tensor.grad is not None:
                    parameter.tensor.grad.fill_(torch.nan)
        else:
            self._exchange.residuals.commit()
            if unused:
                self._drop_unused(trainable, idle)
        for parameter in trainable:
            parameter.weightless = parameter.created = False

    def _drop_unused(self, parameters: list[Parameter], idle: list[bool]) -> None:
        """A parameter that no rank used keeps the gradient None, as with one process, unless its residual was paid
        out."""
        users = self._agree([not value for value in idle])
        for parameter, count, value in zip(parameters, users, idle, strict=True):
            if value and not count and parameter.tensor.grad is not None and not parameter.tensor.grad.any():
                parameter.tensor.grad, parameter.aggregated = None, False

    def _agree(self, values: Iterable[float]) -> npt.NDArray[np.float64]:
        numbers = [float(value) for value in values]
        if self._world.size == 1:
            return np.array(numbers)
        return schedule().submit(lambda: self.turns.agree(numbers)).result()

    # ---- layout

    def _lay_out(self) -> None:
        """Plans buckets: for all trainable parameters at the end of the first backward, in the order in which rank 0
        saw them; later for parameters that were unfrozen since. Residuals begin with the first exchange, so nothing
        has to move."""
        new = [p for p in self._parameters if p.tensor.requires_grad and p.index not in self._bucket_of]
        if not new:
            return
        if self._order is None:
            self._check_equal()
            self._order = self._ready_order()
            position = {name: i for i, name in enumerate(self._order)}
            new.sort(key=lambda p: position.get(p.name, len(position) + len(self._parameters) - p.index))
        else:
            new.reverse()
            self._order += [parameter.name for parameter in new]
        for bucket in plan(new, self.aggregation.bucket_bytes):
            self._buckets.append(bucket)
            self._bucket_of.update({parameter.index: bucket for parameter in bucket.parameters})
        for parameter in new:
            self._bucket_of.setdefault(parameter.index, Bucket(parameter.tensor.dtype, True))  # no elements

    def _ready_order(self) -> list[str]:
        ranks = [0.0] * len(self._parameters)
        if self._world.rank == 0:
            seen = dict.fromkeys(self._seen)
            rest = [p.index for p in reversed(self._parameters) if p.index not in seen and p.tensor.requires_grad]
            for position, index in enumerate([*seen, *rest], start=1):
                ranks[index] = position
        agreed = self._agree(ranks)
        return [self._parameters[i].name for i in np.argsort(agreed, kind="stable") if agreed[i] > 0]

    def _check_equal(self) -> None:
        """All ranks must have the same parameters and settings: else they would exchange different things."""
        described = [
            (p.name, tuple(p.tensor.shape), str(p.tensor.dtype), p.tensor.requires_grad) for p in self._parameters
        ]
        digest = zlib.crc32(repr((described, self.aggregation)).encode()) & 0xFFFFFF  # squares of 24 bits are exact
        total, squares = self._agree([digest, digest**2])
        if squares * self._world.size != total**2:
            raise TrainingError(
                "ranks have different parameters or aggregation settings",
                cause="the model depends on the rank, parameters are frozen on some ranks only, or settings differ",
                next_step="build the same model with the same arguments on every rank",
            )

    # ---- what the script calls

    @property
    def density(self) -> float:
        """The density in force: falling during warm-up; 1 where aggregation is dense."""
        return self.aggregation.density_at(self.steps) if self._exchange.large.sparse else 1.0

    @property
    def residual_copy(self) -> tuple[int, int]:
        """Which copy of the residuals this rank holds a part of, and how many copies the world has."""
        return self._exchange.residuals.copy, self._exchange.residuals.copies

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """backward() inside only accumulates; the next backward() outside exchanges the sum. Unlike in DDP, what
        counts is where backward() runs, not where forward does."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    @property
    def accumulating(self) -> bool:
        """Whether gradients of `no_sync()` wait for an exchange."""
        return self._unsynchronized

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
        if self._unsynchronized:
            raise TrainingError(
                "step() follows a backward() under no_sync(): every rank would take a step of its own",
                next_step="run the last backward() before step() outside no_sync()",
            )
        skip, self._nonfinite = self._nonfinite and (self._last_nonfinite or self._holds_nonfinite()), False
        if not skip:
            with phases.current.timed("update"):
                self.inner.step()
            self.steps += 1
        return loss

    def _holds_nonfinite(self) -> bool:
        return any(p.tensor.grad is not None and not torch.isfinite(p.tensor.grad).all() for p in self._parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        wait(self._futures)  # none are left but after a backward that broke off: they would still write into .grad
        self.inner.zero_grad(set_to_none)
        self._nonfinite = self._last_nonfinite = self._unsynchronized = False
        for parameter in self._parameters:
            parameter.aggregated, parameter.stash = False, None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise TrainingError(
            "a parameter group cannot be added to a distributed optimizer: its parameters have no names",
            next_step="add it to the torch optimizer, then wrap that with all named parameters",
        )

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under "topkube" what this rank adds: its residuals by parameter name,
        the order of the buckets, steps (the warm-up's position) and skipped steps. Every rank must save its own."""
        residuals = self._exchange.residuals
        own = {
            "order": self._order,
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
        self.steps, self.skipped_steps = own.get("steps", 0), own.get("skipped_steps", 0)
        self._exchange.residuals.load(own.get("residuals", {}).get("pieces", {}))
        self._buckets, self._bucket_of, self._order = [], {}, None
        self._plan_saved(own.get("order"))

    def _plan_saved(self, order: list[str] | None) -> None:
        """The same buckets as when the state was saved: selection is per bucket, so a resumed run needs them to go on
        bit for bit."""
        by_name = {parameter.name: parameter for parameter in self._parameters}
        if order is None or any(name not in by_name for name in order):
            return
        self._order = list(order)
        self._buckets = plan([by_name[name] for name in order], self.aggregation.bucket_bytes)
        for bucket in self._buckets:
            self._bucket_of.update({parameter.index: bucket for parameter in bucket.parameters})

    # ---- the rest of torch.optim.Optimizer is the wrapped optimizer's

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.inner!r}, {self.aggregation})"


def _checked(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> list[Parameter]:
    """The optimizer's parameters with their names, in the order in which they are named."""
    named = list(named_parameters)
    wanted = {id(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}
    names, tensors = {}, set()
    for entry in named:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ArgumentError(
                "named_parameters must yield (name, parameter) pairs", next_step="pass model.named_parameters()"
            )
        name, tensor = entry
        if name in names or id(tensor) in tensors:
            raise ArgumentError(
                f"parameter {name} is named twice",
                cause="two models whose parameters have equal names, or a parameter listed twice",
                next_step="give every parameter one name of its own, for example f'generator.{name}'",
            )
        names[name] = tensor
        tensors.add(id(tensor))
    if missing := sum(key not in tensors for key in wanted):
        raise ArgumentError(
            f"{missing} of the optimizer's {len(wanted)} parameters have no name in named_parameters",
            next_step="pass model.named_parameters() of the model whose parameters the optimizer got",
        )
    chosen = [(name, tensor) for name, tensor in names.items() if id(tensor) in wanted]
    for name, tensor in chosen:
        if tensor.dtype not in DTYPES:
            raise ArgumentError(
                f"parameter {name} has dtype {tensor.dtype}", next_step="use float32, bfloat16 or float16 parameters"
            )
    return [Parameter(index, name, tensor) for index, (name, tensor) in enumerate(chosen)]


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
