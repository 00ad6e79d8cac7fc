"""Mixed precision with float32 master weights: the model computes in bfloat16 or float16, the optimizer in float32
(Micikevicius et al., "Mixed Precision Training", 2018).

Gradients are scaled with torch's GradScaler where float16 needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from topkube.errors import ArgumentError
from topkube.training.layerwise import evaluated
from topkube.training.wrapper import OptimizerWrapper

_NARROW = (torch.bfloat16, torch.float16)


class MasterWeights(OptimizerWrapper):
    """Wraps `optimizer`, whose 16-bit parameters get float32 masters: a step casts the gradients to float32, updates
    the masters, and rounds them back into the model. Both casts are one fused operation over all tensors.

    Use it inside DistributedOptimizer: `DistributedOptimizer(MasterWeights(LARS(model.parameters(), ...)), ...)`.
    Wrap before the first step. The state dict holds the masters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer.state:
            raise ArgumentError(
                "the optimizer has taken steps: its state belongs to 16-bit weights",
                next_step="wrap it before the first step, or load its state afterwards",
            )
        super().__init__(optimizer)
        self._groups: list[dict[str, Any]] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group in optimizer.param_groups:
            self._groups.append({**group, "params": list(group["params"])})
            group["params"] = [self._master_of(parameter) for parameter in group["params"]]

    def _master_of(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.dtype not in _NARROW:
            return parameter
        master = parameter.detach().float().requires_grad_()
        self._pairs.append((parameter, master))
        return master

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        for outer, inner in zip(self._groups, self.inner.param_groups, strict=True):
            inner.update({name: value for name, value in outer.items() if name != "params"})
        given, taken = [], []
        for parameter, master in self._pairs:
            if parameter.grad is None:
                master.grad = None
                continue
            if master.grad is None:
                master.grad = torch.empty_like(master)
            given.append(parameter.grad)
            taken.append(master.grad)
        if given:
            torch._foreach_copy_(taken, given)
        self.inner.step()
        for outer, inner in zip(self._groups, self.inner.param_groups, strict=True):
            outer.update({name: value for name, value in inner.items() if name != "params"})
        self._round()
        return loss

    def _round(self) -> None:
        """The model becomes what the masters are, rounded to nearest even."""
        if self._pairs:
            torch._foreach_copy_([parameter for parameter, _ in self._pairs], [master for _, master in self._pairs])

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self._groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and the masters under "masters", in the order of the parameters."""
        return {**self.inner.state_dict(), "masters": [master.detach().clone() for _, master in self._pairs]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave; without masters (a plain optimizer's state) those of the model stay."""
        state = dict(state_dict)
        masters = state.pop("masters", None)
        self.inner.load_state_dict(state)
        for outer, inner in zip(self._groups, self.inner.param_groups, strict=True):
            outer.update({name: value for name, value in inner.items() if name != "params"})
        if masters is not None:
            if [tuple(m.shape) for m in masters] != [tuple(m.shape) for _, m in self._pairs]:
                raise ArgumentError(
                    "the saved masters do not fit this model's 16-bit parameters",
                    next_step="build the model as it was when the state was saved",
                )
            for (_, master), saved in zip(self._pairs, masters, strict=True):
                master.copy_(saved)
            self._round()

    # ---- what schedulers and scalers look at

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._groups

    def __repr__(self) -> str:
        return f"MasterWeights({self.inner!r})"
