"""Momentum before selection: the momentum correction of Lin et al., "Deep Gradient Compression", 2018, section 3.2.

If momentum is applied after the exchange, an entry that waited for a hundred steps arrives as one gradient, and its
momentum continues in its direction for ten more steps. Here every shard accumulates velocity, so that the exchange
sends the distance that momentum would have covered. The wrapped optimizer applies it without momentum of its own. For
Adam and AdamW the velocity is the first moment; the second moment is computed from the values that arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from topkube.errors import ArgumentError

_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


class MomentumCorrection:
    """Momentum correction for the parameters of `optimizer` whose exchange is sparse. The optimizer applies momentum to
    the other parameters only.

    Raises ArgumentError for other optimizers than SGD (without dampening, nesterov or fused), Adam and AdamW, and if
    groups differ in momentum or have none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._sgd = optimizer, type(optimizer) is torch.optim.SGD
        self.check(optimizer.param_groups)
        if not self._read_group_momentum(optimizer.param_groups[0]):
            raise self._explain()

    def check(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raise ArgumentError if the optimizer may not have these groups."""
        plain = type(self._optimizer) in _KINDS and not any(
            group.get("nesterov") or group.get("dampening") or (self._sgd and group["fused"]) for group in groups
        )
        if not plain or len({self._read_group_momentum(group) for group in groups}) != 1:
            raise self._explain()

    def _explain(self) -> ArgumentError:
        return ArgumentError(
            f"momentum correction does not support this {type(self._optimizer).__name__}",
            cause="it replaces the momentum of SGD (without dampening, nesterov or fused), Adam or AdamW, which"
            " must be above 0 and the same in all groups",
            next_step="use such an optimizer, or turn off momentum correction",
        )

    def _read_group_momentum(self, group: dict[str, Any]) -> float:
        return float(group["momentum"] if self._sgd else group["betas"][0])

    def read_momentum(self) -> tuple[float, float]:
        """Return the current momentum, which a schedule may change, and the factor of a gradient in its velocity."""
        momentum = self._read_group_momentum(self._optimizer.param_groups[0])
        return momentum, 1.0 if self._sgd else 1.0 - momentum

    @torch.no_grad()
    def step(self, sparse: Iterable[torch.nn.Parameter]) -> None:
        """Make the optimizer's step. Gradients stay as they are. Raises ArgumentError if groups differ in momentum by
        now."""
        self.check(self._optimizer.param_groups)
        chosen = {id(tensor) for tensor in sparse}
        replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group in self._optimizer.param_groups:
            for tensor in group["params"]:
                gradient = tensor.grad
                if id(tensor) in chosen and gradient is not None:
                    (self._prepare_sgd if self._sgd else self._prepare_adam)(tensor, gradient, group)
                    if tensor.grad is not gradient:
                        replaced.append((tensor, gradient))
        try:
            self._optimizer.step()
        finally:
            for tensor, gradient in replaced:
                if tensor.grad is not None:  # a hook of the script may have removed it
                    tensor.grad = gradient

    def _prepare_sgd(self, tensor: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Remove the momentum buffer, so that SGD applies the gradient itself. Add weight decay to a copy of the
        gradient: SGD adds it once, and momentum would have scaled it."""
        self._optimizer.state[tensor].pop("momentum_buffer", None)
        if group["weight_decay"]:
            factor = group["momentum"] / (1 - group["momentum"]) * (-1 if group["maximize"] else 1)
            tensor.grad = gradient.add(tensor, alpha=group["weight_decay"] * factor)

    def _prepare_adam(self, tensor: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Set the first moment so that Adam applies the gradient itself. Adam computes m = b m + (1 - b) g and divides
        it by 1 - b^t: with m = (1 - b^(t-1)) g, the result is g."""
        state = self._optimizer.state[tensor]
        if not state:
            return  # the first step: m = 0 is right
        sign = -1.0 if group["maximize"] else 1.0
        state["exp_avg"].copy_(gradient).mul_(sign)
        if group["weight_decay"] and not group.get(
            "decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW)
        ):
            state["exp_avg"].add_(tensor, alpha=group["weight_decay"])
        state["exp_avg"].mul_(1 - self._read_group_momentum(group) ** float(state["step"]))
