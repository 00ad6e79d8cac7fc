"""Updates during the next forward, for DeAR (Zhang et al., "DeAR: Accelerating Distributed Deep Learning with
Fine-Grained All-Reduce Pipelining", 2023).

When backward returns, gradients are reduced but not gathered: each rank holds the sums of its own segments. The
communication thread gathers the parts of buckets in the reverse order of the exchange, the order of the next forward.
For parameters that are not gathered, `step()` notes the hyperparameters and sets the weights to NaN. The first use of a
parameter waits until its part is gathered, and then updates the part's parameters as the step would have done: the same
operations on the same bits.

Between backward and step, the first use of a gradient waits for its part. If code uses the weights between step and
update without being noticed, its result is NaN.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from topkube.errors import ArgumentError
from topkube.telemetry import phases
from topkube.training.exchange.buckets.storage import is_shared
from topkube.training.exchange.late.watched_tensors import (
    Use,
    forget_tensors,
    is_watched_thread,
    is_watching,
    register_tensors,
    unwatch,
    watch,
)
from topkube.training.exchange.reduction.reduced_parts import ReducedPart, ReducedParts
from topkube.training.ranks import communication_thread

_OPTIMIZERS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""The optimizers that update each parameter from its own gradient and state only."""
SumOverRanks = Callable[[Iterable[float]], Iterable[float]]
"""Returns the sums of numbers over all ranks."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError for an optimizer that may need all gradients at the same time."""
    if type(optimizer) not in _OPTIMIZERS:
        raise ArgumentError(
            f"the overlap dear does not work with {type(optimizer).__name__}",
            cause="a part of the parameters is updated while the gradients of others are still gathered; only"
            f" {', '.join(kind.__name__ for kind in _OPTIMIZERS)} are known to allow that",
            next_step="use one of these optimizers, or leave overlap at backward",
        )


@dataclass(eq=False)
class _LatePart:
    """Parameters whose gradients are not gathered yet. `hyperparameters` holds the hyperparameters of each group at
    `step()`, and `weights` the weights between `step()` and the update; both are None before `step()`. `factor` is the
    factor of clipping."""

    source: ReducedPart
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    factor: float = 1.0
    hyperparameters: list[dict[str, Any]] | None = None
    weights: list[torch.Tensor] | None = None


class LateUpdates:
    """The gathers and updates that one optimizer has not finished. `allow_step` returns a context in which `optimizer`
    may step. Use it in the thread that trains."""

    def __init__(
        self,
        reduced_parts: ReducedParts,
        optimizer: torch.optim.Optimizer,
        allow_step: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._reduced_parts, self._optimizer, self._allow_step = reduced_parts, optimizer, allow_step
        self._parts: list[_LatePart] = []
        self._begun_count = 0
        self._gathers: Future[None] | None = None
        own_reference = weakref.ref(self)  # the hooks must not keep this object alive

        def finish(*_: Any) -> None:
            late_updates = own_reference()
            if late_updates is not None:
                late_updates.finish()

        self._hooks = [  # a script may save or load the state of the wrapped optimizer directly
            optimizer.register_state_dict_pre_hook(finish),
            optimizer.register_load_state_dict_pre_hook(finish),
        ]
        watch()

    @property
    def can_gather_late(self) -> bool:
        """True if every use of a pending tensor in this thread is noticed: uses in compiled code are not."""
        return is_watched_thread() and not _has_compiled_code()

    @property
    def is_pending(self) -> bool:
        """True if a gather or an update is not finished."""
        return bool(self._parts)

    def list_hidden(self) -> list[torch.Tensor]:
        """Return the parameters whose values read as NaN, because their update is not finished."""
        return [parameter for part in self._parts if part.weights is not None for parameter in part.parameters]

    def begin_gathers(self, parts: Sequence[ReducedPart]) -> None:
        """Begin to gather `parts`. All ranks call this at the end of the same backward. `is_in_place` is
        True for every part."""
        self._begun_count = len(parts)
        for source in parts:
            gradients = [p.tensor.grad for p in source.part.parameters if p.tensor.grad is not None]
            part = _LatePart(source, [p.tensor for p in source.part.parameters], gradients)
            self._parts.append(part)
            register_tensors([*part.parameters, *gradients], partial(self._finish_if_needed, part))
            for parameter in source.part.parameters:
                parameter.deliver()
        self._gathers = communication_thread.submit(lambda: self._reduced_parts.gather(parts))

    def step(self) -> None:
        """Make the optimizer's step: at once for parameters whose gradients are whole, later for the others."""
        groups = self._optimizer.param_groups
        if any(part.weights is not None for part in self._parts):  # a second step with the same gradients
            self.finish()
        if not is_watching() or self._has_hooks() or any(group.get("differentiable") for group in groups):
            self.finish()
        for part in [part for part in self._parts if any(is_shared(tensor) for tensor in part.parameters)]:
            self._finish(part)  # something else may read the memory of these weights
        late_ids = {id(tensor) for part in self._parts for tensor in part.parameters}
        hyperparameters = [
            {name: _copy_value(value) for name, value in group.items() if name != "params"} for group in groups
        ]
        with torch._C.DisableTorchFunction():
            self._update(lambda tensor: id(tensor) not in late_ids, hyperparameters)
            for part in self._parts:
                _hide_weights(part)
                part.hyperparameters = hyperparameters
        if not self._parts and _has_compiled_code():
            unwatch()  # torch.compile does not compile code that runs under a TorchFunctionMode

    def finish(self) -> None:
        """Finish all gathers and updates."""
        while self._parts:
            self._finish(self._parts[0])

    def zero_gradients(self) -> bool:
        """Set the gradients to None, without waiting for gathers, if parts are pending and `step()` was called for all
        of them. Return False otherwise; then the gradients stay, and the caller sets them to zero."""
        if not self._parts or any(part.weights is None for part in self._parts):
            return False
        with torch._C.DisableTorchFunction():
            self._optimizer.zero_grad(set_to_none=True)
        return True

    def clip(
        self, max_norm: float, counts_whole: bool, gradients: list[torch.Tensor], sum_over_ranks: SumOverRanks
    ) -> float | None:
        """Scale all gradients so that their norm is at most `max_norm`, without gathering them; return the norm before.

        `gradients` holds all gradients. Every rank counts its segments of pending parts; the other gradients are equal
        on all ranks, and only the rank with `counts_whole` counts them. Return None if a rank has gathered a part
        already, if a part has no results before it is gathered, or after `step()`, whose update must not change:
        nothing is scaled then. All ranks call this together."""
        pending = {id(gradient) for part in self._parts for gradient in part.gradients}
        whole = [gradient for gradient in gradients if id(gradient) not in pending]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            # The gathers of a part continue: its values have their factor only after them.
            counted = [
                (part.source.flat[start:stop], part.factor)
                for part in self._parts
                for start, stop in part.source.halved.ranges or ()
            ]
            counted += [(gradient, 1.0) for gradient in whole] if counts_whole else []
            squares = sum(
                (factor * float(torch.linalg.vector_norm(values, dtype=torch.float64))) ** 2
                for values, factor in counted
            )
            must_gather = len(self._parts) < self._begun_count or any(
                part.source.halved.ranges is None or part.weights is not None for part in self._parts
            )
            total, ranks_that_must_gather = map(float, sum_over_ranks([squares, float(must_gather)]))
            if ranks_that_must_gather:
                return None
            norm = math.sqrt(total)
            factor = min(1.0, max_norm / (norm + 1e-6))
            if factor < 1:
                for part in self._parts:
                    part.factor *= factor
                for gradient in whole:
                    gradient.mul_(factor)
        return norm

    def end(self) -> None:
        """Finish everything, and stop watching uses."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        unwatch()

    # ---- a part

    def _finish_if_needed(self, part: _LatePart, tensor: torch.Tensor, use: Use) -> None:
        """Finish the part before a call uses one of its tensors, if the call needs that."""
        is_parameter = any(tensor is parameter for parameter in part.parameters)
        replaces_gradient, is_stepped = use is Use.GRADIENT, part.weights is not None
        if is_parameter and not is_stepped and not replaces_gradient:
            return  # the weights are complete before the step
        if is_parameter and is_stepped and replaces_gradient:
            return  # the part keeps the gradients for its update
        self._finish(part)

    def _finish(self, part: _LatePart) -> None:
        assert self._gathers is not None
        self._gathers.result()
        if not part.source.halved.is_gathered:
            communication_thread.run(lambda: self._reduced_parts.finish_gather([part.source]))
        # If the wait has failed, every later use fails too: nobody takes NaN for the weights.
        self._parts.remove(part)
        forget_tensors([*part.parameters, *part.gradients])
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
            if part.factor != 1:
                torch._foreach_mul_(part.gradients, part.factor)
            for gradient in part.gradients:
                torch.autograd.graph.increment_version(gradient)
            if part.weights is not None and part.hyperparameters is not None:
                _restore_weights(part)
                self._update_part(part, part.hyperparameters)

    def _update_part(self, part: _LatePart, hyperparameters: list[dict[str, Any]]) -> None:
        """Update the parameters of a part with its gradients. The script may have set other gradients meanwhile."""
        gradients_before = [parameter.grad for parameter in part.parameters]
        part_ids = {id(parameter) for parameter in part.parameters}
        for parameter, gradient in zip(part.parameters, part.gradients, strict=True):
            parameter.grad = gradient
        optimizer: Any = self._optimizer
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        # Hooks that the script has registered since belong to the next step.
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = {}, {}
        try:
            self._update(lambda tensor: id(tensor) in part_ids, hyperparameters)
        finally:
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
            for parameter, before in zip(part.parameters, gradients_before, strict=True):
                parameter.grad = before

    def _update(self, is_chosen: Callable[[torch.Tensor], bool], hyperparameters: list[dict[str, Any]]) -> None:
        """Make the optimizer's step for the chosen parameters, with these hyperparameters of each group."""
        groups = self._optimizer.param_groups
        before = [dict(group) for group in groups]
        try:
            for group, values in zip(groups, hyperparameters, strict=True):
                group.update(values, params=[tensor for tensor in group["params"] if is_chosen(tensor)])
            self._optimizer.param_groups = [group for group in groups if group["params"]]
            with self._allow_step(), phases.current.timed("update"):
                self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
            for group, old_values in zip(groups, before, strict=True):
                group.update(old_values)

    def _has_hooks(self) -> bool:
        """Return True if the script has hooks on the optimizer's step: they must run once per step."""
        optimizer: Any = self._optimizer
        guard_hooks = 1  # StepGuard's own
        hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks) - guard_hooks
        global_hooks = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
        return bool(hooks or global_hooks)


def _hide_weights(part: _LatePart) -> None:
    """Replace the weights by NaN."""
    part.weights = [parameter.data for parameter in part.parameters]
    for parameter in part.parameters:
        torch.autograd.graph.increment_version(parameter)  # a graph that has saved the weights is out of date
        parameter.data = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)


def _restore_weights(part: _LatePart) -> None:
    """Replace NaN by the weights."""
    assert part.weights is not None
    for parameter, weights in zip(part.parameters, part.weights, strict=True):
        parameter.data = weights
    part.weights = None


def _copy_value(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _has_compiled_code() -> bool:
    """Return True if torch.compile has compiled anything in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])
