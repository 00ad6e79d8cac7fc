"""An optimizer around another."""

from __future__ import annotations

from typing import Any

import torch


class OptimizerWrapper(torch.optim.Optimizer):
    """What schedulers, scalers and scripts look at is `inner`'s, unless a subclass has it itself. It is an Optimizer
    for isinstance alone: torch.optim.Optimizer.__init__ is left out, for parameters, state and hooks are not copies.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

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
        if name == "inner":  # not set yet, as while a copy is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)
