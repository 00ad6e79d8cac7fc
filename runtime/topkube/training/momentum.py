"""Momentum before selection: the momentum correction of Lin et al., "Deep Gradient Compression", 2018, section 3.2.

With momentum after the exchange, an entry that waited for a hundred steps arrives as one gradient, and its momentum
goes on in its direction for ten more. Here every shard accumulates velocity, so that what is sent is the way that SGD
with momentum would have gone; the wrapped optimizer then takes it as it is, without momentum of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from topkube.errors import ArgumentError


class MomentumCorrection:
    """Takes momentum out of `optimizer` for parameters whose exchange is sparse; the others keep theirs.

    Raises ArgumentError for anything but plain SGD with one momentum above 0.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        plain = isinstance(optimizer, torch.optim.SGD) and not any(
            group["nesterov"] or group["dampening"] or group["fused"] for group in groups
        )
        if not plain or len({group["momentum"] for group in groups}) != 1 or not groups[0]["momentum"]:
            raise ArgumentError(
                f"momentum correction does not fit this {type(optimizer).__name__}",
                cause="it replaces the momentum of torch.optim.SGD: one momentum above 0 for all groups, without"
                " dampening, nesterov or fused",
                next_step="use such an optimizer, or leave momentum correction off",
            )

    def momentum(self) -> float:
        """The momentum in force: a schedule may change it."""
        return float(self._optimizer.param_groups[0]["momentum"])

    @torch.no_grad()
    def step(self, sparse: Iterable[torch.nn.Parameter]) -> None:
        """The optimizer's step. Weight decay, which the optimizer adds to the gradient, is given the size that momentum
        would have given it."""
        chosen, factor = {id(tensor): tensor for tensor in sparse}, self.momentum() / (1 - self.momentum())
        for group in self._optimizer.param_groups:
            for tensor in group["params"]:
                if id(tensor) in chosen and tensor.grad is not None and group["weight_decay"]:
                    sign = -1 if group["maximize"] else 1
                    tensor.grad.add_(tensor, alpha=sign * group["weight_decay"] * factor)
        self._forget(chosen.values())
        self._optimizer.step()
        self._forget(chosen.values())

    def _forget(self, tensors: Iterable[torch.nn.Parameter]) -> None:
        """Without its buffer SGD takes the gradient itself."""
        for tensor in tensors:
            self._optimizer.state.get(tensor, {}).pop("momentum_buffer", None)
