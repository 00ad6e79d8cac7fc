"""The correction of Adam's second moment for the noise of a node's gradient (gradient_noise.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from topkube.training.node_weights.gradient_noise import NoiseCorrection

_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
"""Optimizers with v = beta v + (1 - beta) g^2 in `exp_avg_sq`. Others are not corrected."""


class SecondMoment(NoiseCorrection):
    """The correction for `optimizer`, one of torch's Adam optimizers: its step uses v / rho. Without it, steps of Adam
    on a node are shorter than those with the mean gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @staticmethod
    def supports(optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the optimizer has a second moment that this class can correct."""
        return type(optimizer) in _KINDS and all(group["betas"][1] > 0 for group in optimizer.param_groups)

    @contextmanager
    @torch.no_grad()
    def corrected(self, ratios: Mapping[torch.Tensor, float]) -> Iterator[None]:
        """Return a context in which the optimizer's step uses v / rho. The state holds v itself before and after."""
        seconds, gradients, divisors, factors = list[Any](), list[torch.Tensor](), list[float](), list[float]()
        groups = {tensor: group for group in self._optimizer.param_groups for tensor in group["params"]}
        for tensor, ratio in ratios.items():
            if ratio == 1 or tensor.grad is None:
                continue
            group, state = groups[tensor], self._optimizer.state[tensor]
            if not state and not _create_state(self._optimizer, tensor, group):
                continue
            beta = group["betas"][1]
            seconds.append(state["exp_avg_sq"])
            gradients.append(_find_gradient(self._optimizer, tensor, group))
            divisors.append(ratio)
            factors.append((1 - beta) / beta * (1 / ratio - 1))
        if seconds:  # then the optimizer's own update, beta v + (1 - beta) g^2, results in the updated v divided by rho
            torch._foreach_div_(seconds, divisors)
            torch._foreach_addcmul_(seconds, gradients, gradients, factors)
        try:
            yield
        finally:
            if seconds:
                torch._foreach_mul_(seconds, divisors)


def _find_gradient(optimizer: torch.optim.Optimizer, tensor: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return the gradient that the optimizer squares: Adam adds weight decay to it, AdamW does not."""
    assert tensor.grad is not None
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    if not group["weight_decay"] or decoupled:
        return tensor.grad
    return tensor.grad.add(tensor, alpha=-group["weight_decay"] if group.get("maximize") else group["weight_decay"])


def _create_state(optimizer: torch.optim.Optimizer, tensor: torch.Tensor, group: dict[str, Any]) -> bool:
    """Create the state of Adam or AdamW as their first step would. Return False for other optimizers, whose first step
    is not corrected."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    state = optimizer.state[tensor]
    is_fused, is_counted_on_device = group["fused"], group["fused"] or group["capturable"]
    state["step"] = torch.zeros(
        (),
        dtype=torch.float64 if torch.get_default_dtype() == torch.float64 and not is_fused else torch.float32,
        device=tensor.device if is_counted_on_device else "cpu",
    )
    for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
        state[name] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
    return True
