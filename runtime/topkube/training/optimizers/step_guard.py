"""The refusal of steps of the torch optimizer that a DistributedOptimizer wraps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from topkube.errors import TrainingError
from topkube.training.optimizers.wrapper import OptimizerWrapper


class StepGuard:
    """A guard that refuses every step of `optimizer`, and of the optimizers inside it, outside `allow_step()`: such a
    step raises TrainingError, because the exchange would not notice it. The guard ends with `remove()`, or when nothing
    refers to it any more.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepping = False
        innermost, me = optimizer, weakref.ref(self)
        while isinstance(innermost, OptimizerWrapper):
            innermost = innermost.inner

        def refuse(*_: Any) -> None:
            guard = me()
            if guard is not None and not guard._stepping:
                raise TrainingError(
                    "step() was called on the torch optimizer instead of the DistributedOptimizer",
                    cause="the script still uses the optimizer that it wrapped",
                    next_step="call step() on the DistributedOptimizer",
                )

        self._hook = innermost.register_step_pre_hook(refuse)

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
        self._hook.remove()
