"""The refusal of steps of the torch optimizer that a DistributedOptimizer wraps, and of the optimizers inside it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from topkube.errors import ArgumentError, TrainingError
from topkube.training.optimizers.wrapper import OptimizerWrapper


class StepGuard:
    """A guard that refuses every step of `optimizer`, and of the optimizers inside it, outside `allow_step()`: such a
    step raises TrainingError, because the exchange would not notice it. The guard ends with `remove()`, or when nothing
    refers to it any more. Raises ArgumentError for an optimizer whose steps it cannot see.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepping = False
        innermost, me = optimizer, weakref.ref(self)
        while isinstance(innermost, OptimizerWrapper):
            innermost = innermost.inner
        name, outer = type(innermost).__name__, weakref.ref(innermost)

        def refuse(stepped: Any, *_: Any) -> None:
            guard = me()
            if guard is None or guard._stepping:
                return
            if stepped is outer():
                raise TrainingError(
                    "step() was called on the torch optimizer instead of the DistributedOptimizer",
                    cause="the script still uses the optimizer that it wrapped",
                    next_step="call step() on the DistributedOptimizer",
                )
            raise TrainingError(
                f"{type(stepped).__name__}, which is inside {name}, made a step without step() of the"
                " DistributedOptimizer: that step would not count, and would use gradients without their checks",
                cause=f"another method of {name} makes the step, such as second_step() of SAM",
                next_step=f"make the DistributedOptimizer the optimizer inside {name}; docs/training.md, SAM, shows it",
            )

        guarded = [inner for inner in _list_optimizers(innermost) if hasattr(inner, "_optimizer_step_pre_hooks")]
        if not guarded:
            raise ArgumentError(
                f"{name} does not call torch.optim.Optimizer.__init__, so its own steps cannot be noticed",
                next_step=f"call super().__init__(params, defaults) in {name}.__init__",
            )
        self._hooks = [inner.register_step_pre_hook(refuse) for inner in guarded]

    @contextmanager
    def allow_step(self) -> Iterator[None]:
        """Return a context in which the optimizer may step."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def remove(self) -> None:
        """Refuse no more steps."""
        for hook in self._hooks:
            hook.remove()


def _list_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return `optimizer` and the torch optimizers in its attributes, and in theirs, that update some of the same
    parameters: Lookahead and SAM have one, and a combination of optimizers has a list of them."""
    own = _list_parameter_ids(optimizer)
    chosen: dict[int, torch.optim.Optimizer] = {}
    waiting: list[Any] = [optimizer]
    while waiting:
        candidate = waiting.pop()
        if id(candidate) in chosen or not isinstance(candidate, torch.optim.Optimizer):
            continue
        if isinstance(candidate, OptimizerWrapper):
            waiting.append(candidate.inner)
        elif candidate is optimizer or _list_parameter_ids(candidate) & own:
            chosen[id(candidate)] = candidate
            for value in vars(candidate).values():
                entries = value.values() if isinstance(value, dict) else value
                waiting += entries if isinstance(value, dict | list | tuple) else [value]
    return list(chosen.values())


def _list_parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
