"""The common part of LARS and LAMB: the step over groups, the choice of adapted tensors, and the trust ratio."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from topkube.errors import ArgumentError


class LayerwiseOptimizer(torch.optim.Optimizer):
    """An optimizer that updates all tensors of a group at once."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all groups. `closure` is called first, with gradients on; the step returns its result."""
        loss = evaluate_closure(closure)
        for group in self.param_groups:
            self._update(group)
        return loss

    @abstractmethod
    def _update(self, group: dict[str, Any]) -> None: ...


def evaluate_closure(closure: Callable[[], Any] | None) -> Any:
    """Return the result of the closure of an optimizer's `step`; None if there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def is_adapted(parameter: torch.Tensor) -> bool:
    """Return True if a parameter has more than one dimension. Biases and the weights of norms are neither adapted nor
    decayed, as in the code of both papers' authors."""
    return parameter.ndim > 1


def compute_trust_ratio(weight: float, update: float) -> float:
    """Return weight / update; 1 if one of the norms is 0 or not finite."""
    return weight / update if weight > 0 and 0 < update < math.inf and weight < math.inf else 1.0


def check_range(name: str, value: float, *, least: float = 0.0, below: float = math.inf) -> None:
    """Raise ArgumentError unless least <= value < below."""
    if not least <= value < below:
        limit = f"at least {least:g}" + ("" if below == math.inf else f" and below {below:g}")
        raise ArgumentError(f"{name} = {value} must be {limit}", next_step=f"choose another {name}")


def list_with_gradients(group: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the group's parameters that have a gradient, with the adapted parameters first, and their gradients."""
    tensors: list[torch.Tensor] = [p for p in group["params"] if p.grad is not None]
    tensors.sort(key=lambda p: not is_adapted(p))
    return tensors, [p.grad for p in tensors if p.grad is not None]


def list_state(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Return a state tensor for each parameter; new tensors are float32 zeros."""
    for parameter in parameters:
        if name not in optimizer.state[parameter]:
            optimizer.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.float32)
    return [optimizer.state[parameter][name] for parameter in parameters]
