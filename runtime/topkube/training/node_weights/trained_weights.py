"""The weights that a node trains: the parameters of the model, or the float32 masters of its 16-bit parameters.

With masters, everything that nodes exchange and save refers to the masters: the change of a node, what it has not sent,
and the weights that all nodes agree on. The 16-bit parameters are the rounded masters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from topkube.training.exchange.buckets.parameter import Parameter


class Masters(Protocol):
    """The float32 masters of 16-bit parameters (optimizers/mixed_precision.py)."""

    def find_master(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the master of a parameter of the model; the parameter itself if it has none."""
        ...

    def take_gradients(self) -> None:
        """Copy new gradients of the model to the masters."""
        ...

    def take_weights(self) -> None:
        """Copy weights that something other than the optimizer wrote into the model to the masters."""
        ...

    def write_weights(self) -> None:
        """Write the rounded masters into the model."""
        ...


class TrainedWeights:
    """The weights that the node's optimizer updates. `parameters` are float32 tensors in the order of `of_model`, the
    parameters of the model; without masters, both are the same."""

    def __init__(self, of_model: Sequence[Parameter], masters: Masters | None) -> None:
        self.of_model, self._masters = list(of_model), masters
        self.parameters = [self._find_trained(parameter) for parameter in of_model]
        self._versions: list[int] = []
        """The versions of the model's parameters when the node or the optimizer last wrote them."""

    def _find_trained(self, parameter: Parameter) -> Parameter:
        master = parameter.tensor if self._masters is None else self._masters.find_master(parameter.tensor)
        if master is parameter.tensor:
            return parameter
        return Parameter(parameter.index, parameter.name, master)  # type: ignore[arg-type]

    @property
    def has_masters(self) -> bool:
        """True if a parameter of the model has a master."""
        return any(p is not trained for p, trained in zip(self.of_model, self.parameters, strict=True))

    def list_gradients(self) -> list[torch.Tensor]:
        """Return the gradients that the optimizer reads. A script may change them in place."""
        if self._masters is not None:
            self._masters.take_gradients()
        return [p.tensor.grad for p in self.parameters if p.tensor.grad is not None]

    def take_changes(self) -> None:
        """Copy weights that a script wrote into the 16-bit parameters to their masters. Reads all 16-bit parameters."""
        if self._masters is not None:
            self._masters.take_weights()

    def write(self) -> None:
        """Write the rounded masters into the model, after something wrote the masters, and note the versions."""
        if self._masters is not None:
            self._masters.write_weights()
        self.note_versions()

    def list_versions(self) -> list[int]:
        """Return the versions of the model's parameters, by which torch counts changes."""
        return [parameter.tensor._version for parameter in self.of_model]

    def note_versions(self) -> None:
        """Note that the model's parameters are as the node or the optimizer wrote them."""
        self._versions = self.list_versions()

    def find_changed(self) -> str:
        """Return the name of a parameter that something else has changed since `note_versions`, "" if there is none."""
        return next(iter(self.list_changed(self._versions)), "")

    def list_changed(self, versions: Sequence[int]) -> list[str]:
        """Return the names of the parameters whose versions are not `versions`."""
        pairs = zip(self.of_model, versions, strict=True)
        return [parameter.name for parameter, version in pairs if parameter.tensor._version != version]

    def find_shared(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return the name of a parameter that shares its memory with one of `tensors`, "" if there is none."""
        addresses = {tensor.data_ptr() for tensor in tensors}
        names = (p.name for p in [*self.of_model, *self.parameters] if p.tensor.data_ptr() in addresses)
        return next(names, "")
