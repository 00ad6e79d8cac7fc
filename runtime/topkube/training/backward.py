"""What happens during `backward()`: hooks see each gradient as it is produced, full buckets are exchanged at once.

A bucket whose gradients are all there goes to the communication thread, which exchanges it while backward goes on. At
the end of backward the rest follows, and all ranks agree whether the step is finite.
"""

from __future__ import annotations

import time
import weakref
from concurrent.futures import Future, wait
from typing import Any

import torch

from topkube.errors import TrainingError
from topkube.telemetry import phases
from topkube.training.aggregation import Aggregation
from topkube.training.buckets import Parameter
from topkube.training.devices import exchange_device
from topkube.training.exchange import Exchange
from topkube.training.layout import Layout
from topkube.training.norms import Norms
from topkube.training.residuals import Momentum
from topkube.training.schedule import schedule
from topkube.training.uneven import Turns
from topkube.world import World


class Backward:
    """The exchange of one optimizer's gradients.

    `steps` counts updates made and `skipped_steps` those that all ranks skipped; `density_used` is the last exchange's.
    `synchronize` is off while gradients only accumulate, and `unsynchronized` tells that some have not been exchanged.
    `norms`, where somebody wants them, are taken of exchanged gradients.
    """

    def __init__(self, world: World, parameters: list[Parameter], aggregation: Aggregation, momentum: Momentum) -> None:
        self.steps = self.skipped_steps = 0
        self.density_used = 1.0
        self.synchronize, self.unsynchronized = True, False
        self.norms: Norms | None = None
        self.turns = Turns(world)
        self.exchange = Exchange(world, aggregation, momentum, exchange_device(parameters))
        self.layout = Layout(world, parameters, aggregation, self.turns.sums)
        self._world, self._parameters, self._aggregation = world, parameters, aggregation
        self._seen: list[int] = []
        self._task: int | None = None
        self._futures: list[Future[bool]] = []
        self._nonfinite = self._last_nonfinite = False
        self._first_gradient = 0.0
        weakref.finalize(self, _remove, [handle for p in parameters for handle in self._hook(p)])

    @property
    def density(self) -> float:
        """The density in force: falling during warm-up; 1 where aggregation is dense."""
        return self._aggregation.density_at(self.steps) if self.exchange.large.sparse else 1.0

    def sparse_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients leave residuals."""
        sparse = (bucket for bucket in self.layout.buckets if self.exchange.is_sparse(bucket))
        return [parameter.tensor for bucket in sparse for parameter in bucket.parameters]

    def takes_step(self) -> bool:
        """Whether the optimizer may step: not where all ranks agreed that a gradient is not finite, unless the script
        has made it finite since. Forgets the verdict."""
        skip, self._nonfinite = self._nonfinite and (self._last_nonfinite or self._holds_nonfinite()), False
        return not skip

    def forget_gradients(self) -> None:
        """Gradients have been zeroed."""
        self._nonfinite = self._last_nonfinite = self.unsynchronized = False
        for parameter in self._parameters:
            parameter.aggregated, parameter.stash = False, None

    def settle(self) -> None:
        """Waits for what a backward that broke off had handed over: it would still write into `.grad`."""
        wait(self._futures)

    def _holds_nonfinite(self) -> bool:
        return any(p.tensor.grad is not None and not torch.isfinite(p.tensor.grad).all() for p in self._parameters)

    # ---- hooks

    def _hook(self, parameter: Parameter) -> list[Any]:
        """Two hooks on a parameter, before and after a gradient is accumulated. They hold this object weakly:
        dropping it, with its optimizer, ends them."""
        me, tensor = weakref.ref(self), parameter.tensor

        def before(gradient: torch.Tensor) -> torch.Tensor | None:
            backward = me()
            return backward._before(parameter, gradient) if backward is not None else None

        def after(_: torch.Tensor) -> None:
            backward = me()
            if backward is not None:
                backward._after(parameter)

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
        if not self.synchronize:
            self.unsynchronized = True
            return
        bucket, buckets = self.layout.bucket_of(parameter), self.layout.buckets
        if self.layout.order is None:
            self._seen.append(parameter.index)
        elif bucket is not None:
            bucket.waiting -= 1
            while len(self._futures) < len(buckets) and buckets[len(self._futures)].waiting <= 0:
                self._hand_over()

    # ---- one backward

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
            self._nonfinite = self._last_nonfinite = self.unsynchronized = False
        self._seen.clear()
        for bucket in self.layout.buckets:
            bucket.waiting = sum(parameter.tensor.requires_grad for parameter in bucket.parameters)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _abandon(self) -> None:
        """The backward before did not end: what it handed over the other ranks have seen, so they wait for the rest
        of it."""
        handed_over, self._futures = self._futures, []
        for future in handed_over:
            future.result()
        if self.exchange.on_device is not None:
            schedule().submit(self.exchange.flush).result()
        self.exchange.residuals.discard()
        if handed_over and self._world.size > 1:
            raise TrainingError(
                f"backward() began after another broke off, {len(handed_over)} of {len(self.layout.buckets)} buckets"
                " in",
                cause="an exception in backward(), or torch.utils.checkpoint with use_reentrant=True",
                next_step="end the process on an exception, and use use_reentrant=False: the ranks are out of step",
            )

    def _hand_over(self) -> None:
        bucket, density = self.layout.buckets[len(self._futures)], self.density
        if not any(parameter.tensor.requires_grad for parameter in bucket.parameters):
            done: Future[bool] = Future()
            done.set_result(True)
            self._futures.append(done)
            return
        warming = self.steps < self._aggregation.warmup_steps
        if self._world.size == 1 and not self.exchange.large.sparse:  # nothing to send: no thread needs to know
            done = Future()
            done.set_result(self.exchange.run(bucket, density, warming))
            self._futures.append(done)
            return
        mark = self.exchange.ready()
        self._futures.append(schedule().submit(lambda: self.exchange.run(bucket, density, warming, mark)))

    def _finish(self) -> None:
        """End of backward, in the thread that called it: the remaining buckets, then the verdict on the step."""
        self._task = None
        if self.synchronize:
            self.layout.complete(self._seen)
            self.density_used = self.density
            while len(self._futures) < len(self.layout.buckets):
                self._hand_over()
            futures, self._futures = self._futures, []
            finite = [future.result() for future in futures]
            if self.exchange.on_device is not None:
                finite.append(schedule().submit(self.exchange.flush).result())
                self.exchange.follow()
            self._conclude(all(finite))
        phases.current.add("backward", time.perf_counter() - self._first_gradient)

    def _conclude(self, finite: bool) -> None:
        trainable = [parameter for bucket in self.layout.buckets for parameter in bucket.parameters]
        idle = [parameter.weightless or parameter.created for parameter in trainable]
        nonfinite, unused = self.turns.sums([not finite, sum(idle)])
        self.unsynchronized = False
        self._last_nonfinite = nonfinite > 0
        if self._last_nonfinite:
            self.exchange.residuals.discard()
            self.skipped_steps += not self._nonfinite
            self._nonfinite = True
            for parameter in trainable:  # the same on every rank, so that clipping and GradScaler decide alike
                if parameter.tensor.grad is not None:
                    parameter.tensor.grad.fill_(torch.nan)
        else:
            self.exchange.residuals.commit()
            if unused:
                self._drop_unused(trainable, idle)
            if self.norms is not None and self.norms.due:
                gradients = [p.tensor.grad for p in trainable if p.tensor.grad is not None]
                self.norms.measure(gradients, self.exchange.residuals.arrays())
        for parameter in trainable:
            parameter.weightless = parameter.created = False

    def _drop_unused(self, parameters: list[Parameter], idle: list[bool]) -> None:
        """A parameter that no rank used keeps the gradient None, as with one process, unless its residual was paid
        out."""
        users = self.turns.sums([not value for value in idle])
        for parameter, count, value in zip(parameters, users, idle, strict=True):
            if value and not count and parameter.tensor.grad is not None and not parameter.tensor.grad.any():
                parameter.tensor.grad, parameter.aggregated = None, False


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
