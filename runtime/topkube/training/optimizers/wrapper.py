"""An optimizer that wraps another optimizer."""

from __future__ import annotations

from typing import Any

import torch


class OptimizerWrapper(torch.optim.Optimizer):
    """An optimizer around `inner`. Schedulers, scalers and scripts read the attributes of `inner`, unless a subclass
    defines them. A wrapper is an Optimizer for isinstance only: it does not call torch.optim.Optimizer.__init__,
    because that would copy the parameters, the state and the hooks.
    """

    _step_supports_amp_scaling = False
    """GradScaler passes the scale to a fused optimizer as attributes, which would be set on this wrapper instead of
    `inner`. With False, it divides the gradients itself, as for any other optimizer."""

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

    def exchanged_parameters(self) -> list[torch.Tensor]:
        """Return the tensors whose gradients backward produces and all ranks exchange, in the order of the groups."""
        return exchanged_parameters(self.inner)

    def take_weights(self) -> None:
        """Adopt weights that something other than `step()` wrote into the model, such as a broadcast."""
        if isinstance(self.inner, OptimizerWrapper):
            self.inner.take_weights()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, for example while a copy is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy needs. The copy does not get `step`, which a scheduler replaces by a
        function of this object."""
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def exchanged_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors whose gradients all ranks exchange for `optimizer`, in the order of its groups."""
    if isinstance(optimizer, OptimizerWrapper):
        return optimizer.exchanged_parameters()
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]
